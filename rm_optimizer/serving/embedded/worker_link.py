"""Server's link to a worker process: questions, answers, and detection of its death or hang within seconds."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from rm_optimizer.errors import CheckpointError, EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.serving.embedded.frames import Frame
from rm_optimizer.serving.engine import DESCRIPTION, EngineDescription, StagedWeights
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
    """Frame that was sent, its answer, and the seconds allowed from the moment the worker begins with it."""

    answer: asyncio.Future[Frame]
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
        self._up: asyncio.Future[Frame] = self._loop.create_future()
        self._num_frames = 0
        self.is_hung = False
        self._kill_reason: str | None = None
        self.ended = asyncio.Event()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rm-worker-send")  # a full pipe must not block the loop
        self._connection, process = _spawned(options, committed)
        self.process = process
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
        frame = await asyncio.shield(self._up)  # one who waits no more does not make it done
        if frame.header["op"] == "failed":
            kinds = {kind.__name__: kind for kind in (CheckpointError, WeightsRefused)}
            raise kinds.get(frame.header["kind"], RMOptimizerError)(frame.header["error"])
        return DESCRIPTION.validate_python(frame.header["description"])

    async def ask(self, frame: Frame, seconds: float = math.inf) -> Frame:
        """Send a question and wait for its answer; questions are answered in the order of their sending.

        Args:
            frame: the question.
            seconds: time limit from its answer to the previous question; the worker is killed past it.

        Raises:
            WorkerDied: if the process ends before it answers.
            WeightsRefused: if that is its answer.
        """
        if self.ended.is_set():
            raise WorkerDied("the worker process has ended")
        number = next(self._ids)
        question = self._waiting[number] = _Question(self._loop.create_future(), seconds)
        data = Frame(frame.header | {"id": number}, frame.payload).encode()
        try:
            await self._loop.run_in_executor(self._sender, self._send, data)
            reply: Frame = await question.answer
        finally:
            self._waiting.pop(number, None)
        if "refused" in reply.header:
            raise WeightsRefused(reply.header["refused"])
        return reply

    async def close(self) -> None:
        """End the process: it exits when its pipe closes, or is killed after some seconds."""
        if self._up.done() and not self.ended.is_set():
            self._sender.submit(self._send, Frame({"op": "stop", "id": -1}).encode())
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
            silent = silent + self._limits.tick if self._num_frames == seen else 0.0
            first = next((number for number, asked in self._waiting.items() if asked.seconds < math.inf), -1)
            busy = busy + self._limits.tick if first == oldest >= 0 else 0.0
            seen, oldest = self._num_frames, first
            limits, is_up = self._limits, self._up.done()
            if silent > (limits.silence if is_up else limits.loading if self._num_frames else limits.start):
                self._kill(f"it gave no sign of life for {silent:.0f} s")
            elif oldest >= 0 and busy > self._waiting[oldest].seconds:
                self.is_hung = True
                self._kill(f"it computed one batch for {busy:.0f} s")

    def _kill(self, reason: str) -> None:
        self._kill_reason = reason
        self.process.kill()

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # the reader reaches the end of the pipe too, and fails every question
            self._connection.send_bytes(data)

    def _read(self) -> None:
        try:
            while True:
                frame = Frame.decode(self._connection.recv_bytes())
                self._num_frames += 1
                if frame.header.get("op") != "alive":
                    self._call(self._received, frame)
        except (EOFError, OSError):
            self._call(self._died)

    def _call(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _received(self, frame: Frame) -> None:
        if "op" in frame.header:
            self._up.set_result(frame)
        elif (asked := self._waiting.get(frame.header["id"])) is not None and not asked.answer.done():
            asked.answer.set_result(frame)

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
