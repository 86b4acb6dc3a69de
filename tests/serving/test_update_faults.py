"""Processes that are killed during an update: what serves afterwards is the old weights or the new, whole and named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.update_protocol import Begin
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from rm_optimizer.serving.weights.sending import Payload, sent_tensors, weight_probe
from tests.serving.engines import exported
from tests.serving.running import free_socket, serve_process, wait_ready
from tests.serving.test_weight_sync import PARITY, PROMPTS, RESPONSES
from tests.serving.trained import moved

pytestmark = pytest.mark.slow
FULL = RewardModelTrainingMode.full
KILL_DELAYS = (0.0, 0.005, 0.02, 0.06)
"""Seconds between sending a commit and killing the worker; with the kill before, as many as an engine restarts."""


def models_of(checkpoint: Path, number: int) -> list[BradleyTerryRM]:
    return [moved(BradleyTerryRM.from_pretrained(checkpoint), seed) for seed in range(1, number + 1)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def uploaded(url: str, model: BradleyTerryRM, version: str) -> None:
    """Begin an update and transfer all of it, without a commit."""
    payload = Payload(sent_tensors(model, FULL))
    begin = Begin(
        batch_id=version,
        mode=FULL,
        version=version,
        tensors=list(payload.specs),
        transport=Transport.inline,
        probe=weight_probe(model),
    )
    httpx.post(f"{url}/rm/weights/begin", json=begin.model_dump(mode="json"), timeout=60).raise_for_status()
    body = b"".join(payload.body())
    httpx.put(f"{url}/rm/weights/upload/{version}", content=body, timeout=60).raise_for_status()


def commit(url: str, version: str) -> httpx.Response:
    return httpx.post(f"{url}/rm/weights/commit", json={"batch_id": version}, timeout=60)


@contextmanager
def asked_all_the_time(url: str, answers: list[ScoredBatch]) -> Iterator[None]:
    """Scores until the block ends; whatever is answered goes to the list."""
    done = threading.Event()

    def ask() -> None:
        with RewardClient(url, timeout_seconds=120) as client:
            while not done.is_set():
                answers.append(client.score_versioned(PROMPTS, RESPONSES))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=120)


def assert_whole(answers: list[ScoredBatch], rewards: dict[str, torch.Tensor]) -> None:
    """Every answer is that of the model whose version it names."""
    for answer in answers:
        torch.testing.assert_close(torch.tensor(answer.rewards), rewards[answer.version], atol=PARITY, rtol=0)


def test_a_worker_that_is_killed_around_a_commit_leaves_old_or_new_weights(tmp_path):
    original = exported("llama", tmp_path / "export")
    models = models_of(tmp_path / "export", 1 + len(KILL_DELAYS))
    answers: list[ScoredBatch] = []
    with serve_process(tmp_path / "export") as server:
        serving = httpx.get(f"{server.url}/version").json()["version"]
        rewards = {serving: original.score(PROMPTS, RESPONSES)}
        rewards |= {f"new-{place}": model.score(PROMPTS, RESPONSES) for place, model in enumerate(models)}
        with asked_all_the_time(server.url, answers):
            uploaded(server.url, models[0], "new-0")
            os.kill(server.process.worker, signal.SIGKILL)
            wait_restarted(server, 1)
            assert httpx.get(f"{server.url}/version").json()["version"] == serving
            outcome = commit(server.url, "new-0").json()  # what was received outlives the worker
            assert (outcome["status"], outcome["version"]) == ("committed", "new-0")
            serving = "new-0"
            with RewardClient(server.url) as client:
                answers.append(client.score_versioned(PROMPTS, RESPONSES))
            for place, delay in enumerate(KILL_DELAYS, 1):
                serving = killed_at_commit(server, models[place], serving, f"new-{place}", delay, place + 1)
        with RewardClient(server.url) as client:
            answers.append(client.score_versioned(PROMPTS, RESPONSES))
        assert answers[-1].version == serving
    assert_whole(answers, rewards)
    assert {answer.version for answer in answers} >= {"new-0"}


def killed_at_commit(server, model: BradleyTerryRM, old: str, new: str, delay: float, restarts: int) -> str:
    """What serves after a worker was killed while it was to swap; the server says the same everywhere."""
    uploaded(server.url, model, new)
    said: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: said.append(commit(server.url, new)))
    worker = server.process.worker
    thread.start()
    time.sleep(delay)
    os.kill(worker, signal.SIGKILL)
    thread.join(timeout=60)
    wait_restarted(server, restarts)
    outcome, serving = said[0].json(), httpx.get(f"{server.url}/version").json()["version"]
    if outcome["status"] == "committed":
        assert (said[0].status_code, serving) == (200, new)
    else:
        assert (said[0].status_code, outcome["status"], serving) == (503, "refused", old)
    assert commit(server.url, new).json() == outcome
    return serving


def wait_restarted(server, times: int) -> None:
    """Until the worker's death was seen and another one answers."""
    deadline = time.monotonic() + 120
    while f"rm_worker_restarts_total {times}" not in httpx.get(f"{server.url}/metrics", timeout=20).text:
        assert time.monotonic() < deadline, "the worker was not restarted"
        time.sleep(0.05)
    wait_ready(server)


def test_a_server_that_is_killed_in_an_update_starts_from_its_checkpoint_and_the_publisher_goes_on(tmp_path):
    original = exported("llama", tmp_path / "export")
    new = models_of(tmp_path / "export", 1)[0]
    expected, published = original.score(PROMPTS, RESPONSES), []
    with free_socket() as taken:
        port = taken.getsockname()[1]
    publisher = create_rm_publisher(f"http://127.0.0.1:{port}", timeout_seconds=240)
    at_commit, killed = threading.Event(), threading.Event()

    def stop_before_commit(request: httpx.Request) -> None:
        if request.url.path.endswith("commit") and not killed.is_set():
            at_commit.set()
            assert killed.wait(300)

    publisher._session.event_hooks["request"].append(stop_before_commit)
    with serve_process(tmp_path / "export", port=port) as server:
        version = httpx.get(f"{server.url}/version").json()["version"]
        thread = threading.Thread(target=lambda: published.append(publisher.publish(new, "new")))
        thread.start()
        assert at_commit.wait(120)
        worker = server.process.worker
        server.process.kill()
        server.process.wait()
    deadline = time.monotonic() + 30
    while not is_gone(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(worker), "a worker outlived its server"
    with serve_process(tmp_path / "export", port=port) as server, RewardClient(server.url) as client:
        before = client.score_versioned(PROMPTS, RESPONSES)
        assert_whole([before], {version: expected})
        killed.set()
        thread.join(timeout=200)
        after = client.score_versioned(PROMPTS, RESPONSES)
    publisher.close()
    assert [outcome.version for outcome in published] == ["new"]
    assert_whole([after], {"new": new.score(PROMPTS, RESPONSES)})


def test_a_publisher_sends_again_what_a_dying_worker_lost(tmp_path):
    exported("llama", tmp_path / "export")
    new, killed = models_of(tmp_path / "export", 1)[0], []
    with serve_process(tmp_path / "export") as server:

        def kill_at_commit(request: httpx.Request) -> None:
            if request.url.path.endswith("commit") and not killed:
                killed.append(server.process.worker)
                os.kill(killed[0], signal.SIGKILL)

        with create_rm_publisher(server.url, timeout_seconds=240) as publisher:
            publisher._session.event_hooks["request"].append(kill_at_commit)
            assert publisher.publish(new, "new").version == "new"
        with RewardClient(server.url) as client:
            assert_whole([client.score_versioned(PROMPTS, RESPONSES)], {"new": new.score(PROMPTS, RESPONSES)})
    assert len(killed) == 1
