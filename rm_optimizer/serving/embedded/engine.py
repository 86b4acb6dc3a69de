"""Embedded engine: a `transformers` model in a process of its own, restarted from its last good weights."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rm_optimizer.errors import EngineFailed, EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.serving.embedded.frames import Frame, frame_rewards, sequences_frame
from rm_optimizer.serving.embedded.worker_link import DEFAULT_LIMITS, WorkerDied, WorkerLimits, WorkerLink
from rm_optimizer.serving.engine import STAGED, EngineDescription, ScoredBatch, StagedWeights, new_revision
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.restart_limit import RestartLimit
from rm_optimizer.serving.weights.weight_history import UpdatableEngine, WeightHistory

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


class TransformersEngine(UpdatableEngine):
    """Engine that scores in a worker process and restarts it after a failure.

    Args:
        options: options of the worker.
        limits: times after which a silent worker is replaced.
    """

    def __init__(self, options: WorkerOptions, limits: WorkerLimits = DEFAULT_LIMITS) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rm-serve-"))
        super().__init__(WeightHistory(self._folder / "history", is_listed=False))
        self.revision = new_revision()
        self.options = replace(options, tokenizer_folder=str(self._folder / "tokenizer"), revision=self.revision)
        self.limits = limits
        self.num_restarts = 0
        self._link: WorkerLink | None = None
        self._description: EngineDescription | None = None
        self.version = ""
        self._up = asyncio.Event()
        self.failure: str | None = None
        self._is_stopped = False
        self._watcher: asyncio.Task[None] | None = None
        self._restarts = RestartLimit("the worker process")
        self._time = BatchTime()

    @property
    def description(self) -> EngineDescription:
        """Description of the served model; available once `start` has returned."""
        assert self._description is not None, "the engine has not started"
        return self._description

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
        frame, tokens = sequences_frame({"op": "score"}, sequences, group_sizes), sum(map(len, sequences))
        for _ in range(ATTEMPTS):
            link = await self._running()
            started = time.monotonic()
            try:
                answer = await link.ask(frame, self._time.limit(tokens))
            except WorkerDied:
                continue
            self._time.note(tokens, time.monotonic() - started)
            return ScoredBatch(frame_rewards(answer), answer.header["version"], answer.header["revision"])
        raise EngineUnavailable(f"{ATTEMPTS} worker processes died on this batch")

    async def _read(self, weights: StagedWeights) -> None:
        await self._live_link().ask(Frame({"op": "stage", "weights": STAGED.dump_python(weights, mode="json")}))

    async def _swap_in(self, weights: StagedWeights) -> None:
        num_tokens = sum(map(len, weights.probe.input_ids)) if weights.probe else 0
        frame = Frame({"op": "commit", "revision": weights.revision})
        await self._live_link().ask(frame, SWAP_SECONDS + self._time.limit(num_tokens))
        self.version, self.revision = weights.version, weights.revision
        self._history.remember(weights)

    async def _discard(self) -> None:
        if self.is_up:
            await self._live_link().ask(Frame({"op": "rollback"}), SWAP_SECONDS)

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
        """Start a new worker after each death, up to the restart limit."""
        while self._link is not None:
            await self._link.ended.wait()
            self._up.clear()
            self._drop_staged()
            if self._link.is_hung:
                self._time.double()
            _log.error("the worker process ended (%s); starting another", self._link.end_reason)
            try:
                await self._relaunch()
            except RMOptimizerError as error:
                self.failure = str(error)
                self._up.set()  # wakes the callers that wait for a worker
                return
            _log.warning("another worker process answers, with weights %s, revision %d", self.version, self.revision)

    async def _relaunch(self) -> None:
        """Start a worker with the last served weights, or with the checkpoint's if those cannot be loaded again.

        Raises:
            RMOptimizerError: if there will be none.
        """
        while True:
            self._restarts.note()
            self.num_restarts += 1
            try:
                return await self._launch()
            except WorkerDied:
                continue
            except WeightsRefused as error:
                _log.error("weights %s cannot be loaded again: %s; the checkpoint's serve instead", self.version, error)
                self._history.clear()
                self.version, self.revision = self.description.version, new_revision(self.revision)
                self.options = replace(self.options, revision=self.revision)

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
