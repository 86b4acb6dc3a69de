"""Replicas behind one port: one version for all, whichever process is killed or stopped, and whenever."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import PublishFailed
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from tests.fork_server import forked_by
from tests.serving.engines import exported
from tests.serving.running import serve_process
from tests.serving.test_server_killed import descendants
from tests.serving.test_update_faults import asked_all_the_time, assert_whole, models_of
from tests.serving.test_weight_sync import PROMPTS, RESPONSES

pytestmark = pytest.mark.slow
RECOVERY_SECONDS = 30.0
FAULTS = 6


def front_of(server) -> int:
    """Process that listens: the child of the process that restarts it, once there is one."""
    starter = forked_by(server.process.pid)
    children = Path(f"/proc/{starter}/task/{starter}/children")
    wait_for(lambda: children.read_text())
    [front] = children.read_text().split()
    return int(front)


def workers_of(server) -> list[int]:
    """Processes that hold a model."""
    found = []
    for pid in descendants(front_of(server)):
        with suppress(OSError):  # it has just started, or ended
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(forked_by(pid))
    return found


def wait_for(holds, seconds: float = RECOVERY_SECONDS) -> float:
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def end(pid: int, fault: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # a worker of a front that was killed
        os.kill(pid, fault)


def serves(server, version: str) -> bool:
    try:
        answer = httpx.get(f"{server.url}/ready", timeout=2)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["version"] == version


def as_trainers_ask(url: str, model: BradleyTerryRM) -> list[ScoredBatch]:
    """Answers to the requests of OpenRLHF, and of a trainer that sends token ids."""
    rows = [list(row.ids) for row in model.renderer.encode_batch(PROMPTS, RESPONSES)]
    texts = [model.renderer.text(prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    found = []
    for route, body in (
        ("get_reward", {"query": texts}),
        ("classify", {"input": rows, "use_activation": False}),
    ):
        answer = httpx.post(f"{url}/{route}", json=body, timeout=60).raise_for_status()
        read = answer.json()
        rewards = read["rewards"] if route == "get_reward" else [datum["probs"][0] for datum in read["data"]]
        weights = answer.headers["x-rm-version"], int(answer.headers["x-rm-revision"])
        found.append(ScoredBatch(tuple(rewards), *weights))
    return found


def test_an_update_reaches_all_replicas_or_none_and_outlives_every_process(tmp_path):
    original, checkpoint = exported("llama", tmp_path / "export"), tmp_path / "export"
    models = models_of(checkpoint, FAULTS + 1)
    answers, rng = [], random.Random(0)
    with serve_process(checkpoint, "--replicas", "2") as server:
        served = httpx.get(f"{server.url}/version").json()["version"]
        rewards = {served: original.score(PROMPTS, RESPONSES)}
        rewards |= {f"v{number}": model.score(PROMPTS, RESPONSES) for number, model in enumerate(models)}
        wait_for(lambda: len(workers_of(server)) == 2)
        with (
            create_rm_publisher(server.url) as publisher,
            asked_all_the_time(server.url, answers),
            asked_all_the_time(server.url, answers),
        ):
            served = publisher.publish(models[0], "v0").version
            for number in range(1, FAULTS + 1):
                victim = front_of(server) if number % 3 == 0 else rng.choice(workers_of(server))
                fault = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
                threading.Timer(rng.uniform(0.0, 0.3), end, (victim, fault)).start()
                try:
                    served = publisher.publish(models[number], f"v{number}").version
                except PublishFailed:
                    served = httpx.get(f"{server.url}/ready", timeout=RECOVERY_SECONDS).json()["version"]
                wait_for(lambda served=served: serves(server, served))
                with RewardClient(server.url) as client:
                    answers.append(client.score_versioned(PROMPTS, RESPONSES))
                assert answers[-1].version == served
                wait_for(lambda: len(workers_of(server)) == 2)
            answers.extend(as_trainers_ask(server.url, models[FAULTS]))
    assert_whole(answers, rewards)
    assert len({answer.version for answer in answers}) >= FAULTS // 2


def test_a_folder_of_state_keeps_weights_and_names_over_restarts(tmp_path):
    exported("llama", tmp_path / "export")
    first, second = models_of(tmp_path / "export", 2)
    options = ("--state", str(tmp_path / "state"))
    with serve_process(tmp_path / "export", *options) as server, create_rm_publisher(server.url) as publisher:
        published = publisher.publish(first, "v1")
    with serve_process(tmp_path / "export", *options) as server:
        with RewardClient(server.url) as client:
            scored = client.score_versioned(PROMPTS, RESPONSES)
        assert scored.weights == (published.version, published.revision)
        assert_whole([scored], {"v1": first.score(PROMPTS, RESPONSES)})
        with create_rm_publisher(server.url) as publisher:
            with pytest.raises(PublishFailed, match="version v1 has served other weights here"):
                publisher.publish(second, "v1")
            assert publisher.publish(first, "v1").version == "v1"
