"""`rm-opt serve` as a user starts and stops it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.serve import ServeOptions
from rm_optimizer.serving.api_errors import MAX_HEADER_BYTES
from tests.serving.engines import exported
from tests.serving.test_openapi import free_port

KEY = {"authorization": "Bearer secret"}


@pytest.mark.slow
def test_the_server_starts_answers_and_ends_with_every_accepted_request_answered(tmp_path):
    model = exported("qwen2", tmp_path / "model")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start = "from rm_optimizer.interfaces.cli import app; app()"
    command = [sys.executable, "-c", start, "serve", str(tmp_path / "model")]
    options = ["--port", str(port), "--api-key", "secret", "--served-model-name", "mine", "--token-budget", "256"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = [server.stdout.readline(), server.stdout.readline()]
            assert f"ready: {url} serves 'mine'" in lines[1]
            assert httpx.get(f"{url}/ready").status_code == 401
            assert httpx.get(f"{url}/ready", headers=KEY).status_code == 200
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(b"GET /" + b"x" * MAX_HEADER_BYTES)
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


def test_wrong_options_are_told_by_name(tmp_path):
    with pytest.raises(ConfigError, match="unknown --dtype 'bfloat61'; did you mean 'bfloat16'"):
        ServeOptions("model", dtype="bfloat61")
    with pytest.raises(ConfigError, match="--weights-root must be a folder"):
        ServeOptions("model", weights_root=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--api-key must not be empty"):
        ServeOptions("model", api_key=" ")


def test_missing_packages_name_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["serve", "model"])
    assert done.exit_code == 2
    assert "pip install 'rm-optimizer[serve]'" in done.output + capsys.readouterr().err
