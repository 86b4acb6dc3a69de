"""`rm-opt serve` as a user starts and stops it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.commands import serve as serve_module
from rm_optimizer.interfaces.commands.serve import bound_socket, kept_state
from rm_optimizer.records.files import held
from rm_optimizer.serving.options import ServeOptions, name_of
from rm_optimizer.serving.service.api_errors import MAX_HEADER_BYTES
from rm_optimizer.serving.service.inputs import stored_tokenizer
from tests.builders import decoder_tokenizer, encoder_tokenizer
from tests.serving.engines import exported
from tests.serving.server_processes import START
from tests.serving.test_openapi import free_port

KEY = {"authorization": "Bearer secret"}


@pytest.mark.slow
def test_the_server_starts_answers_and_ends_with_every_accepted_request_answered(tmp_path):
    model = exported("qwen2", tmp_path / "model")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", START, "serve", str(tmp_path / "model")]
    options = ["--port", str(port), "--api-key", "secret", "--served-model-name", "mine", "--token-budget", "256"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = [server.stdout.readline(), server.stdout.readline()]
            assert f"ready: {url} serves 'mine'" in lines[1]
            assert httpx.get(f"{url}/ready").status_code == 401
            assert httpx.get(f"{url}/ready", headers=KEY).status_code == 200
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")
            body = {"model": "mine", "items": [{"prompt": "Hi", "responses": ["Hello.", "No."]}]}
            rewards = httpx.post(f"{url}/rm/score", json=body, headers=KEY).json()["rewards"][0]
            assert rewards == pytest.approx(model.score(["Hi"] * 2, ["Hello.", "No."]).tolist(), abs=1e-4)

            answers: list[int] = []
            large = {"input": [[5 + i % 300] * 120 for i in range(300)]}
            request = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(f"{url}/classify", json=large, headers=KEY, timeout=120).status_code
                )
            )
            request.start()
            time.sleep(0.5)
            server.send_signal(signal.SIGTERM)
            request.join()
            assert answers == [200]
            assert server.wait(timeout=60) == 0
            assert "stopped" in server.stdout.read()
        finally:
            server.kill()


@pytest.mark.slow
def test_a_server_with_other_rewards_ends_with_their_cause(tmp_path):
    model = exported("bert", tmp_path / "model")
    scores = [(prompt, "Yes.", float(model.score(prompt, "Yes."))) for prompt in ("Hi", "Why?", "And you?", "Go on.")]
    for name, sign in (("right", 1), ("wrong", -1)):
        rows = [{"prompt": prompt, "response": text, "reward": sign * reward} for prompt, text, reward in scores]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    port = str(free_port())
    command = [sys.executable, "-c", START, "serve", str(tmp_path / "model"), "--port", port, "--token-budget", "256"]
    command += ["--api-key", "secret", "--check"]
    for check in ("right.jsonl", "model"):
        with subprocess.Popen([*command, str(tmp_path / check)], stdout=subprocess.PIPE, text=True) as server:
            lines = [server.stdout.readline() for _ in range(3)]
            server.terminate()
            assert [line.split()[2] for line in lines] == ["loading", "comparing", "ready:"]
            server.stdout.read()
    ended = subprocess.run([*command, str(tmp_path / "wrong.jsonl")], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "differ on 4 of 4 rewards" in ended.stderr
    assert "Cause: swapped labels." in ended.stderr
    with pytest.raises(RMOptimizerError, match="no model at"):
        serve_module.serve(ServeOptions(str(tmp_path / "model"), port=int(port), check=str(tmp_path / "absent")))


def test_wrong_options_are_told_by_name(tmp_path):
    with pytest.raises(ConfigError, match="unknown --dtype 'bfloat61'; did you mean 'bfloat16'"):
        ServeOptions("model", dtype="bfloat61")
    with pytest.raises(ConfigError, match="--weights-root must be a folder"):
        ServeOptions("model", weights_root=tmp_path / "nothing")
    for key in ("", " ", "a b", " a", "clé", "a\n"):
        for option in ("api_key", "update_key"):
            with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} must be ASCII characters without"):
                ServeOptions("model", **{option: key})
    with pytest.raises(ConfigError, match="unknown --transports 'glo'; did you mean 'gloo'"):
        ServeOptions("model", transports="inline,glo")
    with pytest.raises(ConfigError, match="--update-key and --no-updates exclude each other"):
        ServeOptions("model", update_key="a", takes_updates=False)
    for name in ("", " rm", "a\nb", "\udcff", "x" * 257):
        with pytest.raises(ConfigError, match="--served-model-name must be 1 to 256 printable"):
            ServeOptions("model", served_model_name=name)


@pytest.mark.parametrize(
    ("host", "options", "warned", "checked"),
    [
        ("127.0.0.1", {}, None, True),
        ("localhost", {"api_key": "a"}, None, False),
        ("::1", {}, None, True),
        ("0.0.0.0", {"api_key": "a"}, None, False),
        ("0.0.0.0", {}, "may score and replace the weights: set --api-key, or --no-updates", False),
        ("10.0.0.1", {"takes_updates": False}, "may score: set --api-key", False),
        ("::", {"update_key": "b"}, "may score: set --api-key", False),
    ],
)
def test_an_open_server_is_warned_of_and_a_local_one_checks_the_host(host, options, warned, checked):
    told = ServeOptions("model", host=host, **options)
    assert (told.warning is None) == (warned is None)
    assert warned is None or warned in told.warning
    assert told.checks_host == checked


def test_a_model_is_named_by_its_run_where_its_folder_says_nothing(tmp_path, monkeypatch):
    (tmp_path / "run" / "best").mkdir(parents=True)
    assert name_of(str(tmp_path / "run" / "best")) == name_of(f"{tmp_path}/run/") == "run"
    assert name_of("Qwen/Qwen2.5-0.5B") == "Qwen2.5-0.5B"
    monkeypatch.chdir(tmp_path / "run" / "best")
    assert name_of(".") == "run"


def test_a_taken_port_is_told_in_one_sentence_before_anything_is_loaded(capsys):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "no-such-model", "--port", str(port)])
    said = done.output + "".join(capsys.readouterr())
    assert done.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port} (address already in use); choose another --port" in said
    assert "loading" not in said
    with pytest.raises(RMOptimizerError, match=r"cannot listen on 203\.0\.113\.7:8000"):
        bound_socket("203.0.113.7", 8000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "signals", "code", "out", "said"),
    [
        ("loading", [signal.SIGTERM], 0, "rm-opt serve: stopped\n", ""),
        ("loading", [signal.SIGINT, signal.SIGINT], 130, "", "error: stopped\n"),
        ("ready", [signal.SIGINT], 130, "", "error: stopped\n"),
        ("ready", [signal.SIGTERM, signal.SIGINT], 130, "", "error: stopped\n"),
    ],
)
def test_signals_end_a_server_in_seconds_and_one_sentence(tmp_path, when, signals, code, out, said):
    exported("llama", tmp_path / "model")
    port = str(free_port())
    command = [sys.executable, "-c", START, "serve", tmp_path / "model", "--port", port, "--token-budget", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            while when not in server.stdout.readline():
                assert server.poll() is None
            body = {"input": [[5 + i % 300] * 120 for i in range(1000)]}  # seconds of work
            asking = threading.Thread(target=lambda: status_of(f"http://127.0.0.1:{port}/classify", body))
            if when == "ready":
                asking.start()
                time.sleep(0.5)
            started = time.monotonic()
            for each in signals:
                server.send_signal(each)
                time.sleep(0.05)
            printed = server.communicate(timeout=60)
            seconds = time.monotonic() - started
            if when == "ready":
                asking.join()
        finally:
            server.kill()
    told = "".join(line for line in printed[1].splitlines(keepends=True) if " WARNING rm-opt serve: " not in line)
    assert (server.returncode, printed[0], told) == (code, out, said)
    assert seconds < (60 if when == "ready" and len(signals) == 1 else 10)  # less than a worker is waited for


def status_of(url: str, body: object) -> int | None:
    """Status of the answer; None if the server closes the connection."""
    try:
        return httpx.post(url, json=body, timeout=120).status_code
    except httpx.TransportError:
        return None


def test_missing_packages_name_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["serve", "model"])
    assert done.exit_code == 2
    assert "pip install 'rm-optimizer[serve]'" in done.output + capsys.readouterr().err


def test_a_server_that_can_answer_no_more_ends_with_the_reason(monkeypatch):
    async def loaded(*_: object) -> None: ...

    class Served:
        """A server whose engine fails for good while it answers."""

        should_exit = force_exit = stopped = False
        engine = SimpleNamespace(failure=None)

        async def serve(self, sockets: object) -> None:
            while not self.should_exit:
                await asyncio.sleep(0.01)
                self.engine.failure = "the worker process ended 6 times within 20 s"

        async def stop(self) -> None:
            self.stopped = True

    monkeypatch.setattr(serve_module, "_load", loaded)
    monkeypatch.setattr(serve_module, "WATCH_SECONDS", 0.02)
    both = Served()
    with pytest.raises(RMOptimizerError, match="cannot answer any more: the worker process ended 6 times"):
        asyncio.run(asyncio.wait_for(serve_module._run(both, None, both, None), timeout=10))
    assert both.stopped


IMPORTED = """
import sys
from pathlib import Path
from importlib import import_module
from rm_optimizer.interfaces.commands.serve import LISTENER_MODULES
for module in LISTENER_MODULES:
    import_module(module)
from rm_optimizer.serving.service.inputs import stored_tokenizer
print(stored_tokenizer(Path(sys.argv[1]))("A dog.")["input_ids"])
heavy = {"torch", "accelerate", "pandas", "scipy", "sklearn", "sympy", "rm_optimizer.core.model.reward_model"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("make", [decoder_tokenizer, pytest.param(encoder_tokenizer, marks=pytest.mark.slow)])
def test_the_process_that_speaks_http_imports_no_model_and_reads_the_tokenizer_by_its_class(tmp_path, make):
    make().save_pretrained(tmp_path)
    known = AutoTokenizer.from_pretrained(tmp_path)
    read = subprocess.run([sys.executable, "-c", IMPORTED, tmp_path], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == [str(known("A dog.")["input_ids"]), "[]"]
    assert type(stored_tokenizer(tmp_path)) is type(known)


def test_a_folder_of_state_that_another_server_holds_is_refused_by_its_option(tmp_path):
    refusals: list[str] = []

    def other_server() -> None:
        with pytest.raises(ConfigError) as refused, kept_state(ServeOptions("model", state=tmp_path / "state")):
            raise AssertionError("two servers hold one folder")
        refusals.append(str(refused.value))

    with held(tmp_path / "state", "update"):
        thread = threading.Thread(target=other_server)
        thread.start()
        thread.join()
    assert len(refusals) == 1
    assert refusals[0].endswith("choose another --state")
