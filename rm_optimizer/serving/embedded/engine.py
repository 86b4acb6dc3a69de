"""Embedded engine: a `transformers` model in a separate process, restarted from its last good weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rm_optimizer.errors import CheckpointError, EngineFailed, EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.serving.child_process import RestartLimit
from rm_optimizer.serving.engine import (
    Engine,
    EngineDescription,
    ScoredBatch,
    StagedWeights,
    WeightHistory,
    new_revision,
)
from rm_optimizer.serving.options import WorkerOptions


class WorkerDied(EngineUnavailable):
    """The worker process ended before it answered."""


@dataclass(frozen=True)
class WorkerLimits:
    """Seconds after which a worker that shows no sign of life is killed.

    Args:
        start: seconds until its first sign of life, while it imports its libraries.
        loading: seconds between two signs until its model is loaded.
        silence: seconds between two signs afterwards; it sends one each second, also while it computes.
        stop: seconds to finish its computation after a stop.
        tick: seconds between two checks.
    """

    start: float = 300.0
    loading: float = 120.0
    silence: float = 10.0
    stop: float = 10.0
    tick: float = 0.5


DEFAULT_LIMITS = WorkerLimits()


@dataclass(eq=False)
class _Question:
    """Answer to a question, and the seconds allowed from the moment the worker begins with it."""

    answer: asyncio.Future[tuple[Any, str | None]]
    seconds: float


class WorkerLink:
    """Link to one worker process, from its start to its end; a restart creates another link.

    Args:
        options: options of the worker.
        committed: updates to apply to the checkpoint, oldest first.
        limits: times after which a silent worker is killed.
    """

    def __init__(
        self, options: WorkerOptions, committed: Sequence[StagedWeights], limits: WorkerLimits = DEFAULT_LIMITS
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._ids = itertools.count()
        self._waiting: dict[int, _Question] = {}
        self._up: asyncio.Future[tuple[Any, ...]] = self._loop.create_future()
        self._num_messages = 0
        self.is_hung = False
        self._kill_reason: str | None = None
        self.ended = asyncio.Event()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rm-worker-send")  # a full pipe must not block the loop
        self._connection, self.process = _spawned(options, committed)
        threading.Thread(target=self._read, name="rm-worker-read", daemon=True).start()
        self._watcher = asyncio.create_task(self._watch(), name="rm-worker-watch")

    @property
    def end_reason(self) -> str:
        """Reason why the process ended, in words."""
        return self._kill_reason or f"exit code {self.process.exitcode}"

    async def up(self) -> EngineDescription:
        """Wait until the model is loaded.

        Raises:
            WorkerDied: if the process ends before.
            WeightsRefused: if an update cannot be loaded.
            RMOptimizerError: if the model cannot be loaded.
        """
        kind, *report = await asyncio.shield(self._up)  # one who waits no more does not make it done
        if kind == "failed":
            name, reason = report
            kinds = {kind.__name__: kind for kind in (CheckpointError, WeightsRefused)}
            raise kinds.get(name, RMOptimizerError)(reason)
        description: EngineDescription = report[0]
        return description

    async def ask(self, method: str, *arguments: object, seconds: float = math.inf) -> Any:
        """Send a question and wait for its answer; questions are answered in the order of their sending.

        Args:
            method: name of a method of `Worker`.
            arguments: its arguments.
            seconds: time limit from its answer to the previous question; the worker is killed past it.

        Raises:
            WorkerDied: if the process ends before it answers.
            WeightsRefused: if that is its answer.
        """
        if self.ended.is_set():
            raise WorkerDied("the worker process has ended")
        number = next(self._ids)
        question = self._waiting[number] = _Question(self._loop.create_future(), seconds)
        try:
            self._sender.submit(self._send, (number, method, *arguments))
            result, refusal = await question.answer
        finally:
            self._waiting.pop(number, None)
        if refusal is not None:
            raise WeightsRefused(refusal)
        return result

    async def close(self) -> None:
        """End the process: it exits when its pipe closes, or is killed after some seconds."""
        if self._up.done() and not self.ended.is_set():
            self._sender.submit(self._send, None)
        else:
            self.process.kill()
        await self._wait_ended(self._limits.stop)
        self.process.kill()
        await self._wait_ended(self._limits.stop)
        self._watcher.cancel()
        await asyncio.to_thread(self.process.join, self._limits.stop)

    async def _wait_ended(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)

    async def _watch(self) -> None:
        """Kill a hung worker. Checks are counted, not seconds, so that a pause of the server does not count.

        A stopped process sends nothing; a process whose computation hangs still sends signs of life.
        """
        seen, silent, oldest, busy = 0, 0.0, -1, 0.0
        while not self.ended.is_set():
            await asyncio.sleep(self._limits.tick)
            silent = silent + self._limits.tick if self._num_messages == seen else 0.0
            first = next((number for number, asked in self._waiting.items() if asked.seconds < math.inf), -1)
            busy = busy + self._limits.tick if first == oldest >= 0 else 0.0
            seen, oldest = self._num_messages, first
            limits, is_up = self._limits, self._up.done()
            if silent > (limits.silence if is_up else limits.loading if self._num_messages else limits.start):
                self._kill(f"it gave no sign of life for {silent:.0f} s")
            elif oldest >= 0 and busy > self._waiting[oldest].seconds:
                self.is_hung = True
                self._kill(f"it computed one batch for {busy:.0f} s")

    def _kill(self, reason: str) -> None:
        self._kill_reason = reason
        self.process.kill()

    def _send(self, question: tuple[object, ...] | None) -> None:
        with suppress(OSError):  # the reader reaches the end of the pipe too, and fails every question
            self._connection.send(question)

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                self._num_messages += 1
                if message != ("alive",):
                    self._call(self._received, message)
        except (EOFError, OSError):
            self._call(self._died)

    def _call(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _received(self, message: tuple[Any, ...]) -> None:
        if isinstance(message[0], str):
            self._up.set_result(message)
        elif (asked := self._waiting.get(message[0])) is not None and not asked.answer.done():
            asked.answer.set_result((message[1], message[2]))

    def _died(self) -> None:
        self.ended.set()
        self._watcher.cancel()
        self._sender.shutdown(wait=False)
        for answer in (self._up, *(asked.answer for asked in self._waiting.values())):
            if not answer.done():
                answer.set_exception(WorkerDied("the worker process ended before it answered"))
        if self._up.done() and not self._up.cancelled():
            self._up.exception()  # marks the exception as retrieved


def _spawned(options: WorkerOptions, committed: Sequence[StagedWeights]) -> tuple[Connection, SpawnProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, options, committed), name="rm-worker", daemon=True)
    ended_by_server = {signal.SIGINT, signal.SIGTERM}  # Ctrl-C reaches the whole group
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ended_by_server)
    process.start()  # a process inherits the mask, so that not even its imports are interrupted
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # the server's end of the pipe must close when the process ends
    return ours, process


def _run(connection: Connection, options: WorkerOptions, committed: Sequence[StagedWeights]) -> None:
    """Run the worker, whose imports load torch and models, which the server's process does not need."""
    from rm_optimizer.serving.embedded.worker import run_worker

    run_worker(connection, options, committed)


ATTEMPTS = 3
"""Most workers that die on one batch before the batch is abandoned as the possible cause."""
SWAP_SECONDS = 60.0
"""Seconds allowed for a swap of weights, its probe excluded."""
_log = logging.getLogger("rm_optimizer")


class BatchTime:
    """Time limit of a batch, far above the times of earlier batches; past it the worker counts as hung."""

    LEAST_SECONDS = 15.0
    SLACK = 20.0
    FIRST_SECONDS_A_TOKEN = 0.05
    LEAST_TOKENS = 256
    """Least number of tokens that a batch counts as, since every pass has a fixed cost."""

    def __init__(self) -> None:
        self._seconds_a_token = self.FIRST_SECONDS_A_TOKEN

    def limit(self, tokens: int) -> float:
        """Time limit of a batch of these tokens, in seconds."""
        return self.LEAST_SECONDS + self.SLACK * self._seconds_a_token * max(tokens, self.LEAST_TOKENS)

    def note(self, tokens: int, seconds: float) -> None:
        """Record the time of a batch; slow batches weigh more."""
        self._seconds_a_token = max(seconds / max(tokens, self.LEAST_TOKENS), 0.9 * self._seconds_a_token)

    def double(self) -> None:
        """Double the limit, after a batch whose worker was killed."""
        self._seconds_a_token *= 2


class TransformersEngine(Engine):
    """Engine that scores in a worker process and restarts it after a failure.

    Args:
        options: options of the worker.
        limits: times after which a silent worker is replaced.
    """

    def __init__(self, options: WorkerOptions, limits: WorkerLimits = DEFAULT_LIMITS) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rm-serve-"))
        super().__init__(WeightHistory(self._folder / "history"))
        self.options = replace(options, tokenizer_folder=str(self._folder / "tokenizer"), revision=self.revision)
        self.limits = limits
        self._link: WorkerLink | None = None
        self._up = asyncio.Event()
        self._is_stopped = False
        self._watcher: asyncio.Task[None] | None = None
        self._restarts = RestartLimit("the worker process")
        self._time = BatchTime()

    @property
    def is_up(self) -> bool:
        """True while the model is loaded and its process runs."""
        return self._up.is_set() and self.failure is None and not self._is_stopped

    async def start(self) -> None:
        """Load the model; see `Engine.start`."""
        await self._launch()
        self.version = self.description.version
        self._watcher = asyncio.create_task(self._watch(), name="rm-engine-watch")

    async def stop(self) -> None:
        """End the worker after its accepted batches; a second call does nothing."""
        self._is_stopped = True
        self._up.set()  # wakes the callers that wait for a worker
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def score(self, sequences: Sequence[Sequence[int]], group_sizes: Sequence[int] | None = None) -> ScoredBatch:
        """Rewards of the sequences; a batch whose worker dies goes to the next worker. See `Engine.score`."""
        tokens = sum(map(len, sequences))
        for _ in range(ATTEMPTS):
            link = await self._running()
            started = time.monotonic()
            try:
                scored: ScoredBatch = await link.ask("score", sequences, group_sizes, seconds=self._time.limit(tokens))
            except WorkerDied:
                continue
            self._time.note(tokens, time.monotonic() - started)
            return scored
        raise EngineUnavailable(f"{ATTEMPTS} worker processes died on this batch")

    async def _read(self, weights: StagedWeights) -> None:
        await self._live_link().ask("stage", weights)

    async def _swap_in(self, weights: StagedWeights) -> None:
        num_tokens = sum(map(len, weights.probe.input_ids)) if weights.probe else 0
        seconds = SWAP_SECONDS + self._time.limit(num_tokens)
        await self._live_link().ask("commit", weights.revision, seconds=seconds)
        self.version, self.revision = weights.version, weights.revision
        self._history.remember(weights)

    async def _discard(self) -> None:
        if self.is_up:
            await self._live_link().ask("expect", None, seconds=SWAP_SECONDS)

    async def _launch(self) -> None:
        self._link = WorkerLink(self.options, self._history.committed, self.limits)
        try:
            description = await self._link.up()
            if self._description is not None:
                self._description.require_same(description, self.options.checkpoint)
        except (RMOptimizerError, asyncio.CancelledError):
            await self._link.close()
            raise
        if self._description is None:
            self._description = description
            self.options = replace(self.options, token_budget=description.token_budget)  # a restart need not measure
        self._up.set()

    async def _watch(self) -> None:
        """Start a new worker after each death, up to the restart limit.

        It serves the last weights, or the checkpoint's if those cannot be loaded again.
        """
        while self._link is not None:
            await self._link.ended.wait()
            self._up.clear()
            self._drop_staged()
            if self._link.is_hung:
                self._time.double()
            _log.error("the worker process ended (%s); starting another", self._link.end_reason)
            while not self._up.is_set():
                try:
                    self._restarts.note()
                    self.num_restarts += 1
                    await self._launch()
                except WorkerDied:
                    continue
                except WeightsRefused as error:
                    refused = "weights %s cannot be loaded again: %s; the checkpoint's serve instead"
                    _log.error(refused, self.version, error)
                    self._history.clear()
                    self.version, self.revision = self.description.version, new_revision(self.revision)
                    self.options = replace(self.options, revision=self.revision)
                except RMOptimizerError as error:
                    self.failure = str(error)
                    self._up.set()  # wakes the callers that wait for a worker
                    return
            _log.warning("another worker process answers, with weights %s, revision %d", self.version, self.revision)

    async def _running(self) -> WorkerLink:
        """Return the worker once it is up.

        Raises:
            EngineUnavailable: if there will be none.
        """
        while True:
            await self._up.wait()
            link = self._live_link()
            if not link.ended.is_set():
                return link
            await asyncio.sleep(0)  # it died, and the watcher has not run yet

    def _live_link(self) -> WorkerLink:
        if self._is_stopped:
            raise EngineUnavailable("the engine has stopped")
        if self.failure is not None:
            raise EngineFailed(f"the engine cannot answer any more: {self.failure}")
        if self._link is None or not self._up.is_set():
            raise EngineUnavailable("the worker process is starting; try again")
        return self._link
