"""A worker that stands still is killed, whatever it stands still in, and whoever waits for it is told."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from multiprocessing import get_context

import pytest

from rm_optimizer.serving.embedded import engine as engine_module
from rm_optimizer.serving.embedded.engine import BatchTime, WorkerDied, WorkerLimits, WorkerLink, worker_ahead
from rm_optimizer.serving.options import WorkerOptions
from tests.serving import still_worker

LIMITS = WorkerLimits(start=60.0, loading=60.0, silence=0.6, stop=0.3, tick=0.05)


def linked(monkeypatch, behavior: str, scene, limits: WorkerLimits = LIMITS):
    """What a scene makes of a link to a worker that behaves so."""

    def spawned(*_):
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=still_worker.run, args=(theirs, behavior), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    async def run():
        link = WorkerLink(None, [], limits)
        try:
            return await scene(link)
        finally:
            await link.close()

    monkeypatch.setattr(engine_module, "_spawned", spawned)
    return asyncio.run(run())


@pytest.mark.parametrize(
    ("behavior", "reason"), [("silent", "gave no sign of life"), ("hung", "computed one batch for")]
)
def test_a_worker_that_stands_still_is_killed_and_its_questions_fail(monkeypatch, behavior, reason):
    async def scene(link):
        await link.up()
        asked = time.monotonic()
        with pytest.raises(WorkerDied):
            await link.ask("score", b"0" * 2**20, seconds=1.5)  # more than its pipe holds
        assert time.monotonic() - asked < 60
        return link.end_reason

    assert reason in linked(monkeypatch, behavior, scene)


def test_a_worker_that_never_says_a_word_is_killed(monkeypatch):
    async def scene(link):
        with pytest.raises(WorkerDied):
            await link.up()
        return link.end_reason

    assert "gave no sign of life for 2 s" in linked(monkeypatch, "dumb", scene, replace(LIMITS, start=2.0))


def test_a_worker_with_nothing_to_do_and_a_slow_stage_are_left_alone(monkeypatch):
    async def scene(link):
        await link.up()
        stage = asyncio.create_task(link.ask("stage"))
        await asyncio.sleep(1.0)
        alive = not link.ended.is_set()
        stage.cancel()
        return alive

    assert linked(monkeypatch, "hung", scene)


def test_a_worker_that_does_not_stop_is_killed_in_time(monkeypatch):
    async def scene(link):
        await link.up()
        return time.monotonic()

    stopped = linked(monkeypatch, "silent", scene)
    assert time.monotonic() - stopped < 60


def test_a_batch_may_take_many_times_what_batches_took():
    allowed = BatchTime()
    assert allowed.limit(1024) > 600  # nothing was measured yet
    for _ in range(100):
        allowed.note(1024, 0.5)
    assert allowed.limit(1024) == pytest.approx(15 + 20 * 0.5)
    allowed.note(1024, 5.0)
    assert allowed.limit(1024) == pytest.approx(15 + 20 * 5.0)
    allowed.double()
    assert allowed.limit(1024) == pytest.approx(15 + 20 * 10.0)


def started_ahead(monkeypatch):
    """Processes that the engine starts from now on."""
    started = []

    def start(engine):
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        started.append(context.Process(target=still_worker.run, args=(theirs, "silent"), daemon=True))
        started[-1].start()
        theirs.close()
        return ours, started[-1]

    monkeypatch.setattr(engine_module, "_started", start)
    return started


def test_the_first_link_takes_the_process_that_was_started_ahead(monkeypatch):
    started, options = started_ahead(monkeypatch), WorkerOptions("model")

    async def scene():
        links = [WorkerLink(each, [], LIMITS) for each in (replace(options, engine="vllm"), options, options)]
        for link in links:
            await link.close()
        return [link.process for link in links]

    with worker_ahead("transformers"):
        other, first, second = asyncio.run(scene())
    assert first is started[0]
    assert [other, second] == started[1:]


def test_a_process_ahead_that_no_link_takes_is_killed(monkeypatch):
    started = started_ahead(monkeypatch)
    with pytest.raises(SystemExit), worker_ahead("transformers"):
        raise SystemExit
    started[0].join(20)
    assert started[0].exitcode == -signal.SIGKILL
    assert not engine_module._AHEAD
