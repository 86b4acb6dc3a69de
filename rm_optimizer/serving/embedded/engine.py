"""Engine with the model in separate processes, restarted from its last good weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rm_optimizer.core.tokens.prefix_trees import LEAST_SHARED
from rm_optimizer.errors import CheckpointError, EngineFailed, EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.serving.child_process import MOST_FLEET_RESTARTS, RestartLimit, resident_bytes
from rm_optimizer.serving.engine import Engine, EngineDescription, ScoredBatch, StagedWeights, WeightHistory
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

    def __init__(self, options: WorkerOptions, committed: Sequence[StagedWeights], limits: WorkerLimits) -> None:
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
                self.kill(f"it gave no sign of life for {silent:.0f} s")
            elif oldest >= 0 and busy > self._waiting[oldest].seconds:
                self.is_hung = True
                self.kill(f"it computed one batch for {busy:.0f} s")

    def kill(self, reason: str) -> None:
        """Kill the process, which then ends for this reason."""
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


_AHEAD: list[tuple[str, Connection, SpawnProcess]] = []


@contextmanager
def worker_ahead(engine: str) -> Iterator[None]:
    """Start a worker process for the first link of this block, so that it imports while this process does.

    Args:
        engine: engine of the worker's options.
    """
    _AHEAD.append((engine, *_started(engine)))
    try:
        yield
    finally:
        for _, connection, process in _AHEAD:
            process.kill()
            connection.close()
        _AHEAD.clear()


def _spawned(options: WorkerOptions, committed: Sequence[StagedWeights]) -> tuple[Connection, SpawnProcess]:
    if _AHEAD and _AHEAD[-1][0] == options.engine:
        _, connection, process = _AHEAD.pop()
    else:
        connection, process = _started(options.engine)

    def give() -> None:  # blocks while the process imports, if there are many updates
        with suppress(OSError):  # a process that has ended is noticed by its reader
            connection.send((options, committed))

    threading.Thread(target=give, name="rm-worker-options", daemon=True).start()
    return connection, process


def _started(engine: str) -> tuple[Connection, SpawnProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, engine), name="rm-worker", daemon=True)
    ended_by_server = {signal.SIGINT, signal.SIGTERM}  # Ctrl-C reaches the whole group
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ended_by_server)
    process.start()  # a process inherits the mask, so that not even its imports are interrupted
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # the server's end of the pipe must close when the process ends
    return ours, process


def _run(connection: Connection, engine: str) -> None:
    """Run a worker on the options that the connection sends.

    Its imports load torch and models, which the server's process does not need.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # no import may fix the GPUs before a worker has chosen one
    from rm_optimizer.serving.embedded.worker import TransformersWorker, Worker, run_worker

    kind: Callable[[WorkerOptions, Sequence[StagedWeights]], Worker] = TransformersWorker
    if engine == "vllm":
        from rm_optimizer.serving.embedded.vllm_worker import VllmWorker

        kind = VllmWorker
    with suppress(EOFError):  # the server ended first
        options, committed = connection.recv()
        run_worker(connection, partial(kind, options, committed))


ATTEMPTS = 3
"""Most workers that die on one batch before the batch is abandoned as the possible cause."""
SWAP_SECONDS = 60.0
"""Seconds allowed for a swap of weights, its probe excluded."""
LOAD_SECONDS = 600.0
"""Seconds allowed for vLLM to load weights and score their probe."""
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


@dataclass(eq=False)
class _Replica:
    """Copy of the model in a worker process, which another process replaces after its death.

    Args:
        number: number of the replica.
        restarts: counter of the restarts.
        link: link to the process; None before its first start.
        is_up: True while the process serves the current weights.
        tokens: tokens of its unanswered batches.
    """

    number: int
    restarts: RestartLimit
    link: WorkerLink | None = None
    is_up: bool = False
    tokens: int = 0


class WorkerEngine(Engine):
    """Engine that scores in one or more worker processes and restarts them after a failure.

    An update is prepared by every worker: read, checked, and its probe scored. Then it is recorded, which decides it,
    and every worker swaps it in. Rewards of any other revision than the recorded one are discarded and computed again.
    A worker that starts later serves once it has the recorded revision.

    Args:
        options: options of the workers.
        limits: times after which a silent worker is replaced.
        folder: existing folder that keeps the updates for a later engine; None keeps them in a temporary one.
    """

    def __init__(
        self, options: WorkerOptions, limits: WorkerLimits = DEFAULT_LIMITS, *, folder: Path | None = None
    ) -> None:
        self._folder = folder or Path(tempfile.mkdtemp(prefix="rm-serve-"))
        self._is_temporary = folder is None
        super().__init__(WeightHistory(self._folder / "history"))
        tokenizer, vllm = str(self._folder / "tokenizer"), str(self._folder / "vllm")
        self.options = replace(options, tokenizer_folder=tokenizer, vllm_folder=vllm)
        self.limits = limits
        names = [f"worker process {number}" for number in range(options.replicas)]
        limits_of_restarts = [RestartLimit(name, MOST_FLEET_RESTARTS) for name in names]
        if options.replicas == 1:
            limits_of_restarts = [RestartLimit("the worker process")]
        self._replicas = [_Replica(number, limit) for number, limit in enumerate(limits_of_restarts)]
        self._changed = asyncio.Condition()
        self._is_stopped = self._is_restored = False
        self._watchers: list[asyncio.Task[None]] = []
        self._time = BatchTime()

    @property
    def is_up(self) -> bool:
        """True while a replica serves."""
        return bool(self._live) and self.failure is None and not self._is_stopped

    @property
    def replica_bytes(self) -> Mapping[str, int]:
        """Memory of each worker process that serves; see `Engine.replica_bytes`."""
        processes = {one.number: one.link.process.pid for one in self._live if one.link is not None}
        return {str(number): resident_bytes(pid) for number, pid in processes.items() if pid is not None}

    @property
    def _updates(self) -> Sequence[StagedWeights]:
        """Updates that serve; an earlier engine's wait for `restore`."""
        return self.committed if self._is_restored else ()

    @property
    def _live(self) -> list[_Replica]:
        return [one for one in self._replicas if one.is_up and one.link is not None and not one.link.ended.is_set()]

    async def start(self) -> None:
        """Load the model in the first replica, without earlier updates; see `Engine.start`."""
        first = self._replicas[0]
        while not first.is_up:
            try:
                await self._launch(first)
            except WorkerDied:
                if self._is_temporary:
                    raise
                first.restarts.note()
        self._serve_checkpoint()
        self._watch(first)

    async def restore(self) -> None:
        """Apply the updates of an earlier engine, then start the other replicas; see `Engine.restore`."""
        async with self._updating:
            await super().restore()
            self._is_restored = True
        for replica in self._replicas[1:]:
            self._watch(replica)

    def _watch(self, replica: _Replica) -> None:
        self._watchers.append(asyncio.create_task(self._keep_up(replica), name=f"rm-replica-{replica.number}"))

    async def stop(self) -> None:
        """End the workers after their accepted batches; a second call does nothing."""
        self._is_stopped = True
        await self._note_change()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(replica.link.close() for replica in self._replicas if replica.link is not None))
        shutil.rmtree(self._folder if self._is_temporary else self.options.vllm_folder, ignore_errors=True)

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences; a batch whose worker dies goes to the next worker. See `Engine.score`."""
        tokens, num_deaths = sum(map(len, sequences)), 0
        while num_deaths < ATTEMPTS:
            replica, link = await self._chosen(sequences[0][:LEAST_SHARED])
            started = time.monotonic()
            replica.tokens += tokens
            try:
                scored: ScoredBatch = await link.ask("score", sequences, seconds=self._time.limit(tokens))
            except WorkerDied:
                num_deaths += 1
                continue
            finally:
                replica.tokens -= tokens
            self._time.note(tokens, time.monotonic() - started)
            if scored.revision == self.revision:
                return scored
        raise EngineUnavailable(f"{ATTEMPTS} worker processes died on this batch")

    async def _read(self, weights: StagedWeights) -> None:
        await self._on_all(lambda link: self._prepare(link, weights))

    async def _prepare(self, link: WorkerLink, weights: StagedWeights) -> None:
        num_tokens = sum(map(len, weights.probe.input_ids)) if weights.probe else 0
        await link.ask("stage", weights)
        await link.ask("rehearse", weights.revision, seconds=SWAP_SECONDS + self._time.limit(num_tokens))

    async def _swap_in(self, weights: StagedWeights) -> None:
        if self.description.engine == "vllm":  # whose probe is scored by loaded weights alone
            await self._on_all(lambda link: link.ask("load", weights.revision, seconds=LOAD_SECONDS))
        self._history.remember(weights)  # a worker that does not swap it in any more restarts with it
        self.version, self.revision = weights.version, weights.revision

        async def swap_in(link: WorkerLink) -> None:
            try:
                await link.ask("commit", weights.revision, seconds=SWAP_SECONDS)
            except WeightsRefused as error:
                link.kill(str(error))

        with suppress(WorkerDied):
            await self._on_all(swap_in)

    async def _discard(self) -> None:
        if self.is_up:
            await self._on_all(lambda link: link.ask("expect", None, seconds=LOAD_SECONDS))

    async def _on_all(self, ask: Callable[[WorkerLink], Coroutine[Any, Any, object]]) -> None:
        """Ask every live worker, of which those that die do not count while one remains.

        Raises:
            WeightsRefused: if one refuses.
            WorkerDied: if all die.
        """
        links = [replica.link for replica in self._require_live() if replica.link is not None]
        answers = await asyncio.gather(*map(ask, links), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        fatal = [error for error in errors if not isinstance(error, WorkerDied)]
        if fatal or len(errors) == len(links):
            raise (fatal or errors)[0]

    async def _restore(self) -> None:
        self._is_restored = True  # a worker that starts from now on loads them
        with suppress(WorkerDied):
            await self._on_all(lambda link: self._catch_up(link, ()))

    async def _catch_up(self, link: WorkerLink, applied: Sequence[StagedWeights]) -> None:
        """Bring a worker with the given updates to the current revision, and let it prepare what the others have."""
        known = {weights.revision for weights in applied}
        for weights in self._updates:
            if weights.revision not in known:
                await self._prepare(link, weights)
                await link.ask("commit", weights.revision, seconds=LOAD_SECONDS)
        if self._staged is not None:
            await self._prepare(link, self._staged)

    async def _launch(self, replica: _Replica) -> None:
        applied = self._updates
        link = replica.link = WorkerLink(replace(self.options, replica=replica.number), applied, self.limits)
        try:
            loaded = await link.up()
            if self._description is None:
                self._description = replace(loaded, replicas=len(self._replicas))
                # later workers need not measure
                self.options = replace(
                    self.options, token_budget=loaded.token_budget, tree_budget=loaded.tree_budget, tokenizer_folder=""
                )
            self._description.require_same(loaded, self.options.checkpoint)
            async with self._updating:  # no update is staged or committed meanwhile
                await self._catch_up(link, applied)
                replica.is_up = True
        except (RMOptimizerError, asyncio.CancelledError):
            await link.close()
            raise
        await self._note_change()

    async def _keep_up(self, replica: _Replica) -> None:
        """Start a worker whenever the replica has none, up to the restart limit.

        It serves the current weights. If it is the only one and cannot load them, the checkpoint's serve instead.
        """
        while True:
            if replica.link is not None:
                await self._note_end(replica, replica.link)
            while not replica.is_up:
                applied = self._updates
                try:
                    if replica.link is not None:
                        replica.restarts.note()
                        self.num_restarts += 1
                    await self._launch(replica)
                except WorkerDied:
                    continue
                except WeightsRefused as error:
                    if self._live or applied is not self._updates:
                        continue
                    refused = "weights %s cannot be loaded again: %s; the checkpoint's serve instead"
                    _log.error(refused, self.version, error)
                    self._history.clear()
                    self._serve_checkpoint()
                    for other in self._replicas:  # one that starts loads them too
                        if other is not replica and other.link is not None:
                            other.link.kill("its weights do not serve any more")
                except RMOptimizerError as error:
                    await self._give_up(replica, str(error))
                    return
            started = "a worker process answers, with weights %s, revision %d (replica %d)"
            _log.warning(started, self.version, self.revision, replica.number)

    async def _note_end(self, replica: _Replica, link: WorkerLink) -> None:
        """Wait for the end of a worker."""
        await link.ended.wait()
        replica.is_up = False
        if not self._live:
            self._drop_staged()
        if link.is_hung:
            self._time.double()
        _log.error("a worker process ended (%s); starting another", link.end_reason)

    async def _give_up(self, replica: _Replica, reason: str) -> None:
        """Leave out a replica that cannot start any more; without another one the engine has failed."""
        self._replicas.remove(replica)
        if self._replicas:
            _log.error("replica %d does not serve any more: %s", replica.number, reason)
        else:
            self.failure = reason
        await self._note_change()

    async def _note_change(self) -> None:
        """Wake the callers that wait for a replica."""
        async with self._changed:
            self._changed.notify_all()

    async def _chosen(self, start: Sequence[int]) -> tuple[_Replica, WorkerLink]:
        """Return the live replica with the fewest tokens, once there is one.

        vLLM keeps prefixes over batches. So of its replicas that are about as busy, batches with one start go to one.

        Raises:
            EngineUnavailable: if there will be none.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._live or self._is_stopped or self.failure is not None)
        live = self._require_live()
        least = min(replica.tokens for replica in live)
        if least and self.description.engine == "vllm":
            least += self.description.token_budget
        near = [replica for replica in live if replica.tokens <= least]
        replica = max(near, key=lambda replica: hash((replica.number, *start)))
        assert replica.link is not None, "a live replica has a process"
        return replica, replica.link

    def _require_live(self) -> list[_Replica]:
        if self._is_stopped:
            raise EngineUnavailable("the engine has stopped")
        if self.failure is not None:
            raise EngineFailed(f"the engine cannot answer any more: {self.failure}")
        live = self._live
        if not live:
            raise EngineUnavailable("the worker process is starting; try again")
        return live
