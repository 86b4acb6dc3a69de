"""The embedded engine: a `transformers` model in a process of its own, restarted from its last good weights."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.serving.engine import (
    EngineDescription,
    EngineUnavailable,
    ScoredBatch,
    StagedWeights,
    WeightsRefused,
    new_revision,
)
from rm_optimizer.serving.frames import Frame, frame_rewards, sequences_frame
from rm_optimizer.serving.staged_json import staged_to_json
from rm_optimizer.serving.worker import WorkerOptions
from rm_optimizer.serving.worker_link import WorkerDied, WorkerLink

ATTEMPTS = 3
"""Workers that may die on a batch before it is given up: it may be the cause."""
MOST_RESTARTS = 5
"""Restarts within `RESTART_WINDOW_SECONDS` before the engine gives up."""
RESTART_WINDOW_SECONDS = 300.0
_log = logging.getLogger("rm_optimizer")


class TransformersEngine:
    """Scores in a worker process and watches over it.

    Args:
        options: how the worker loads and computes.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rm-serve-"))
        self.revision = new_revision()
        self.options = replace(options, tokenizer_folder=str(self._folder / "tokenizer"), revision=self.revision)
        self.num_restarts = 0
        self._link: WorkerLink | None = None
        self._description: EngineDescription | None = None
        self._version = ""
        self._committed: list[StagedWeights] = []
        self._staged: StagedWeights | None = None
        self._up = asyncio.Event()
        self._failure: str | None = None
        self._updating = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._restarts: deque[float] = deque(maxlen=MOST_RESTARTS)

    @property
    def description(self) -> EngineDescription:
        """What is served; known once `start` has returned."""
        assert self._description is not None, "the engine has not started"
        return self._description

    @property
    def version(self) -> str:
        """Name of the weights that answer the next batch."""
        return self._version

    @property
    def committed(self) -> Sequence[StagedWeights]:
        """Updates that serve on top of the checkpoint, oldest first."""
        return self._committed

    @property
    def is_up(self) -> bool:
        """Whether the model is loaded and its process lives."""
        return self._up.is_set() and self._failure is None

    @property
    def process_id(self) -> int | None:
        """Of the worker; None while there is none."""
        return None if self._link is None else self._link.process.pid

    async def start(self) -> None:
        """Load the model.

        Raises:
            RMOptimizerError: if it cannot be loaded.
        """
        await self._launch()
        self._version = self.description.version
        self._watcher = asyncio.create_task(self._watch(), name="rm-engine-watch")

    async def stop(self) -> None:
        """End the worker after what it was given; a second call does nothing."""
        self._fail("the engine has stopped")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences; a batch whose worker dies goes to the next one.

        Raises:
            EngineUnavailable: if the engine has stopped, or every worker died on this batch.
        """
        frame = sequences_frame({"op": "score"}, sequences)
        for _ in range(ATTEMPTS):
            link = await self._running()
            try:
                answer = await link.ask(frame)
            except WorkerDied:
                continue
            return ScoredBatch(frame_rewards(answer), answer.header["version"], answer.header["revision"])
        raise EngineUnavailable(f"{ATTEMPTS} worker processes died on this batch")

    async def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights beside the old ones, from a link to their file (a copy on another disk).

        Raises:
            WeightsRefused: if a check fails; nothing is staged then.
            EngineUnavailable: if the worker is not up.
        """
        async with self._updating:
            self._drop_staged()
            kept = replace(weights, file=self._spooled(weights.file))
            try:
                await self._live_link().ask(Frame({"op": "stage", "weights": staged_to_json(kept)}))
            except RMOptimizerError:
                kept.file.unlink(missing_ok=True)
                raise
            self._staged = kept

    async def commit(self, revision: int) -> None:
        """Swap in the staged weights between two batches; see `Engine.commit`.

        Raises:
            WeightsRefused: if nothing of this revision is staged, or the probe fails.
            EngineUnavailable: if the worker is not up, or dies; the old weights serve on.
        """
        async with self._updating:
            if self._staged is None or self._staged.revision != revision:
                raise WeightsRefused("the new weights are not staged any more; begin the update again")
            try:
                await self._live_link().ask(Frame({"op": "commit", "revision": revision}))
            except RMOptimizerError:
                self._drop_staged()
                raise
            self._version, self.revision = self._staged.version, revision
            self._remember(self._staged)
            self._staged = None

    async def rollback(self) -> None:
        """Drop what is staged; the weights that serve stay."""
        async with self._updating:
            self._drop_staged()
            if self.is_up:
                await self._live_link().ask(Frame({"op": "rollback"}))

    async def _launch(self) -> None:
        self._link = WorkerLink(self.options, self._committed)
        try:
            description = await self._link.up()
        except (RMOptimizerError, asyncio.CancelledError):
            await self._link.close()
            raise
        if self._description is None:
            self._description = description
            self.options = replace(self.options, token_budget=description.token_budget)  # a restart need not measure
        self._up.set()

    async def _watch(self) -> None:
        """Start a new worker whenever one has died, unless that happens too often."""
        while self._link is not None:
            await self._link.ended.wait()
            self._up.clear()
            self._drop_staged()
            _log.error("the worker process died (exit code %s); starting another", self._link.process.exitcode)
            if not await self._relaunched():
                return

    async def _relaunched(self) -> bool:
        while True:
            now = time.monotonic()
            if len(self._restarts) == MOST_RESTARTS and now - self._restarts[0] < RESTART_WINDOW_SECONDS:
                self._fail(f"{MOST_RESTARTS} worker processes died within {RESTART_WINDOW_SECONDS:.0f} s")
                return False
            self._restarts.append(now)
            self.num_restarts += 1
            try:
                await self._launch()
            except WorkerDied:
                continue
            except RMOptimizerError as error:
                self._fail(f"the worker cannot load its weights again: {error}")
                return False
            return True

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._up.set()  # those who wait for a worker hear of it

    async def _running(self) -> WorkerLink:
        """The worker, once it is up.

        Raises:
            EngineUnavailable: if there will be none.
        """
        while True:
            await self._up.wait()
            link = self._live_link()
            if not link.ended.is_set():
                return link
            await asyncio.sleep(0)  # it died, and the watcher has not yet heard of it

    def _live_link(self) -> WorkerLink:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self._link is None or not self._up.is_set():
            raise EngineUnavailable("the worker process is starting; try again")
        return self._link

    def _spooled(self, file: Path) -> Path:
        target = self._folder / f"{time.monotonic_ns()}.safetensors"
        try:
            os.link(file, target)
        except OSError:
            try:
                shutil.copyfile(file, target)
            except OSError as error:
                raise WeightsRefused(f"{file.name} cannot be read: {error.strerror}") from error
        return target

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.file.unlink(missing_ok=True)
            self._staged = None

    def _remember(self, weights: StagedWeights) -> None:
        """Keep an update for restarts, and forget those all of whose tensors it replaces."""
        names = {spec.name for spec in weights.tensors}
        for earlier in [kept for kept in self._committed if names.issuperset(spec.name for spec in kept.tensors)]:
            self._committed.remove(earlier)
            earlier.file.unlink(missing_ok=True)
        self._committed.append(replace(weights, probe=None))
