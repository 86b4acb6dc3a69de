"""The server's end of a worker process: questions and their answers, and its death as soon as it happens."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from rm_optimizer.errors import CheckpointError, RMOptimizerError
from rm_optimizer.serving.engine import EngineDescription, EngineUnavailable, StagedWeights, WeightsRefused
from rm_optimizer.serving.frames import Frame
from rm_optimizer.serving.staged_json import description_from_json, staged_to_json
from rm_optimizer.serving.worker import WorkerOptions, run_worker


class WorkerDied(EngineUnavailable):
    """The worker process ended before it answered."""


class WorkerLink:
    """One worker process, from its start to its end; a restart makes another link.

    Args:
        options: how it loads and computes.
        committed: updates on top of the checkpoint, oldest first.
    """

    def __init__(self, options: WorkerOptions, committed: Sequence[StagedWeights]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._up: asyncio.Future[Frame] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rm-worker-send")  # a full pipe must not stop the loop
        self._connection, process = _spawned(options, committed)
        self.process = process
        threading.Thread(target=self._read, name="rm-worker-read", daemon=True).start()

    async def up(self) -> EngineDescription:
        """Wait until the model is loaded.

        Raises:
            WorkerDied: if the process ends before.
            RMOptimizerError: if the model cannot be loaded.
        """
        frame = await self._up
        if frame.header["op"] == "failed":
            kind = CheckpointError if frame.header["kind"] == "CheckpointError" else RMOptimizerError
            raise kind(frame.header["error"])
        return description_from_json(frame.header["description"])

    async def ask(self, frame: Frame) -> Frame:
        """Send a question and wait for its answer; questions are answered in the order of their sending.

        Raises:
            WorkerDied: if the process ends before it answers.
            WeightsRefused: if that is its answer.
        """
        if self.ended.is_set():
            raise WorkerDied("the worker process has ended")
        number = next(self._ids)
        answer = self._waiting[number] = self._loop.create_future()
        data = Frame(frame.header | {"id": number}, frame.payload).encode()
        try:
            await self._loop.run_in_executor(self._sender, self._send, data)
            reply: Frame = await answer
        finally:
            self._waiting.pop(number, None)
        if "refused" in reply.header:
            raise WeightsRefused(reply.header["refused"])
        return reply

    async def close(self) -> None:
        """End the process: it sees the end of its pipe, or is killed after some seconds."""
        await self._loop.run_in_executor(None, self._end_process)
        await self.ended.wait()

    def _end_process(self) -> None:
        self._hang_up() if self._up.done() else self.process.kill()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _hang_up(self) -> None:
        self._send(Frame({"op": "stop", "id": -1}).encode())

    def _send(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError:  # the reader sees the end of the pipe too, and fails every question
            return

    def _read(self) -> None:
        try:
            while True:
                self._call(self._received, Frame.decode(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._call(self._died)

    def _call(self, function: object, *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _received(self, frame: Frame) -> None:
        if "op" in frame.header:
            self._up.set_result(frame)
        elif (answer := self._waiting.get(frame.header["id"])) is not None and not answer.done():
            answer.set_result(frame)

    def _died(self) -> None:
        self.ended.set()
        self._sender.shutdown(wait=False)
        for answer in (self._up, *self._waiting.values()):
            if not answer.done():
                answer.set_exception(WorkerDied("the worker process ended before it answered"))
        if self._up.done() and not self._up.cancelled():
            self._up.exception()  # seen, should nobody wait for it


def _spawned(options: WorkerOptions, committed: Sequence[StagedWeights]) -> tuple[Connection, SpawnProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    texts = (json.dumps(asdict(options)), json.dumps([staged_to_json(weights) for weights in committed]))
    process = context.Process(target=run_worker, args=(theirs, *texts), name="rm-worker", daemon=True)
    process.start()
    theirs.close()  # so that our end sees the pipe close when the process ends
    return ours, process
