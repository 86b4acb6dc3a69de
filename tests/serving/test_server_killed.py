"""A server killed with -9 while it swaps weights in: no process of it stays, and its publisher claims no outcome."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import PublishFailed
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.client.connection import Deadline
from rm_optimizer.serving.protocol import MAX_ITEMS
from rm_optimizer.serving.update_protocol import WeightProbe
from rm_optimizer.serving.weights.live_weights import checkpoint_version
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from tests.serving.engines import exported
from tests.serving.running import serve_process
from tests.serving.test_update_faults import assert_whole, is_gone, models_of
from tests.serving.test_weight_sync import PROMPTS, RESPONSES

pytestmark = pytest.mark.slow
CHECKED, SWAPPED = "while the weights are checked", "while they are swapped in"
PUBLISH_SECONDS = 60.0
"""Enough to reach the commit on a busy machine."""
LOST_SECONDS = 1.0
"""Time that the publisher looks for the killed server."""
JSON = {"content-type": "application/json"}


def descendants(pid: int) -> list[int]:
    """A process's children, their children, and so on."""
    lists = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for line in lists for child in line]
    return children + [below for child in children for below in descendants(child)]


def computed(worker: int) -> int:
    """Hundredths of a second that the worker's main thread has computed: it scores and swaps, and else waits."""
    return int(Path(f"/proc/{worker}/task/{worker}/stat").read_text().rpartition(")")[2].split()[11])


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class HurriedDeadline(Deadline):
    """A deadline that can be brought forward."""

    made: ClassVar[list[HurriedDeadline]] = []

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, seconds)
        self.made.append(self)

    def hurry(self) -> None:
        self._end = min(self._end, time.monotonic() + LOST_SECONDS)


class Publication:
    """A publish that runs in a thread, and that is to fail.

    Args:
        url: url of the server.
        model: model that is published, as `new`.
        before_commit: called when the commit is about to be sent.
    """

    def __init__(self, url: str, model: BradleyTerryRM, before_commit: Callable[[], None]) -> None:
        self.url, self.failure, self._before_commit = url, "", before_commit
        self._publisher = create_rm_publisher(url, timeout_seconds=PUBLISH_SECONDS)
        self._publisher._session.event_hooks["request"].append(self._note)
        self._begin = b""
        self._sends_commit = threading.Event()
        self._thread = threading.Thread(target=self._publish, args=(model,))
        self._thread.start()

    def wait_until_under_way(self) -> None:
        """Until the server has the commit: from then on the announcement, repeated, is a conflict."""
        assert self._sends_commit.wait(60)
        begin = f"{self.url}/rm/weights/begin"
        repeated = lambda: httpx.post(begin, content=self._begin, headers=JSON, timeout=60).status_code  # noqa: E731
        wait_until(lambda: repeated() == 409, "no commit came under way")

    def hurry(self) -> None:
        """Look for the killed server no longer than needed."""
        for deadline in HurriedDeadline.made:
            deadline.hurry()

    def join(self) -> None:
        self._thread.join(timeout=3 * PUBLISH_SECONDS)
        assert not self._thread.is_alive()
        self._publisher.close()

    def _note(self, request: httpx.Request) -> None:
        if request.url.path.endswith("begin"):
            self._begin = request.read()
        if request.url.path.endswith("commit") and not self._sends_commit.is_set():
            self._before_commit()
            self._sends_commit.set()

    def _publish(self, model: BradleyTerryRM) -> None:
        try:
            self._publisher.publish(model, "new")
        except PublishFailed as error:
            self.failure = str(error)


def slow_probe(model: BradleyTerryRM) -> WeightProbe:
    """The longest probe, which takes the tiny model seconds, with the new weights in their place."""
    rows = torch.randint(5, 300, (MAX_ITEMS, 128), generator=torch.Generator().manual_seed(0)).tolist()
    return WeightProbe(input_ids=rows, rewards=[0.0] * len(rows))


def kill_in_commit(server, new: BradleyTerryRM, moment: str) -> Publication:
    """Kill the server while it commits; what its publisher then says is still to come."""
    worker = server.process.worker
    freeze = lambda: os.kill(worker, signal.SIGSTOP)  # noqa: E731 - it checks nothing, and the commit waits for it
    publication = Publication(server.url, new, freeze if moment == CHECKED else lambda: None)
    before = computed(worker)
    publication.wait_until_under_way()
    if moment == SWAPPED:
        wait_until(lambda: computed(worker) >= before + 20, "the worker never computed the probe")
    server.process.kill()
    server.process.wait()
    os.kill(worker, signal.SIGCONT)
    publication.hurry()
    return publication


@pytest.mark.parametrize("moment", [CHECKED, SWAPPED])
def test_a_server_killed_in_a_commit_leaves_no_process_and_its_successor_serves_the_checkpoint(
    tmp_path, monkeypatch, moment
):
    original, checkpoint = exported("llama", tmp_path / "export"), tmp_path / "export"
    new = models_of(checkpoint, 1)[0]
    with monkeypatch.context() as patched:
        patched.setattr("rm_optimizer.serving.weights.publisher.Deadline", HurriedDeadline)
        patched.setattr("rm_optimizer.serving.weights.publisher.GIVING_UP_SECONDS", LOST_SECONDS)
        if moment == SWAPPED:
            patched.setattr("rm_optimizer.serving.weights.publisher.weight_probe", slow_probe)
        with serve_process(checkpoint) as server:
            family = descendants(server.process.pid)
            publication = kill_in_commit(server, new, moment)
        wait_until(lambda: all(map(is_gone, family)), f"of {family} some outlived their server")
        publication.join()
    assert publication.failure.startswith(
        f"all of weights new were sent, but {server.url} did not answer whether it serves them; "
    )
    first = {checkpoint_version(original.model, tmp_path / "export", {}): original.score(PROMPTS, RESPONSES)}
    with serve_process(checkpoint, port=httpx.URL(server.url).port) as server, RewardClient(server.url) as client:
        assert_whole([client.score_versioned(PROMPTS, RESPONSES)], first)
        with create_rm_publisher(server.url) as publisher:
            assert publisher.publish(new, "new").version == "new"
        assert_whole([client.score_versioned(PROMPTS, RESPONSES)], {"new": new.score(PROMPTS, RESPONSES)})
