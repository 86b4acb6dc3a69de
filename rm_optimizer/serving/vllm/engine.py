"""Engine inside vLLM's server: rewards from its scheduler, one version an answer, and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rm_optimizer.errors import EngineUnavailable, WeightsRefused
from rm_optimizer.serving.engine import EngineDescription, ScoredBatch, StagedWeights
from rm_optimizer.serving.protocol import WeightProbe
from rm_optimizer.serving.service.reward_probe import check_rewards, probe_sequences
from rm_optimizer.serving.vllm.pooling import Pooling
from rm_optimizer.serving.vllm.read_write_lock import ReadWriteLock
from rm_optimizer.serving.vllm.settings import VllmSettings
from rm_optimizer.serving.vllm.swap import AdapterSwap, ReloadSwap, Serving, Swap
from rm_optimizer.serving.weights.weight_history import WeightHistory

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class VllmEngine:
    """Engine that scores through vLLM's own engine client.

    Args:
        client: engine client of the surrounding vLLM server.
        settings: settings of the served model.
    """

    def __init__(self, client: EngineClient, settings: VllmSettings) -> None:
        scheduler = client.vllm_config.scheduler_config
        self.description: EngineDescription = replace(
            settings.description, token_budget=scheduler.max_num_batched_tokens
        )
        self.num_restarts = settings.num_restarts
        self._pooling = Pooling(client)
        self._lock = ReadWriteLock()
        self._updating = asyncio.Lock()
        self._history = WeightHistory(settings.history_folder)
        self._swap = self._make_swap(settings)
        self._staged: StagedWeights | None = None
        self._is_stopped = False
        self._watcher: asyncio.Task[None] | None = None

    def _make_swap(self, settings: VllmSettings) -> Swap:
        version = self.description.version
        if settings.adapter is not None:
            return AdapterSwap(
                self._pooling, self._history, adapter=settings.adapter, folder=settings.adapters_folder, version=version
            )
        return ReloadSwap(self._pooling, self._lock, self._history, checkpoint=settings.folder, version=version)

    @property
    def version(self) -> str:
        """Name of the weights that answer the next batch."""
        return self._swap.serving.version

    @property
    def revision(self) -> int:
        """Serial number of the weights that answer the next batch."""
        return self._swap.serving.revision

    @property
    def committed(self) -> Sequence[StagedWeights]:
        """Updates that serve on top of the checkpoint, oldest first."""
        return self._history.committed

    @property
    def is_up(self) -> bool:
        """True while the engine's processes run."""
        return not self._is_stopped and self._pooling.is_up

    @property
    def failure(self) -> None:
        """None: a failed engine ends its server, and the supervisor starts another."""

    async def start(self) -> None:
        """Serve the checkpoint's own weights, which vLLM has loaded."""
        await self._swap.start()
        self._watcher = asyncio.create_task(self._pooling.watch(), name="rm-vllm-watch")

    async def restore(self) -> None:
        """Apply the updates of an earlier process of this server to the checkpoint.

        Raises:
            WeightsRefused: if vLLM cannot load them.
        """
        if self._history.committed:
            await self._swap.restore()

    async def stop(self) -> None:
        """Accept no more batches; vLLM's server ends the engine."""
        self._is_stopped = True
        if self._watcher is not None:
            self._watcher.cancel()

    async def score(self, sequences: Sequence[Sequence[int]], group_sizes: Sequence[int] | None = None) -> ScoredBatch:
        """Rewards of the sequences, all of one version; vLLM's prefix cache finds common starts by itself.

        Raises:
            EngineUnavailable: if the engine has died; its supervisor starts another.
        """
        self._require_up()
        async with self._lock.reading():
            serving = self._swap.serving
            rewards = await self._pooling.rewards(sequences, serving.adapter)
            return ScoredBatch(rewards, serving.version, serving.revision)

    async def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights beside the old ones.

        Raises:
            WeightsRefused: if a check fails; nothing is staged then.
            EngineUnavailable: if the engine is not up.
        """
        self._require_up()
        async with self._updating:
            self._drop_file()
            kept = await asyncio.to_thread(self._history.keep, weights)
            try:
                await self._swap.stage(kept)
            except (WeightsRefused, asyncio.CancelledError):
                self._history.forget(kept)
                raise
            self._staged = kept

    async def commit(self, revision: int) -> None:
        """Swap in the staged weights, unless their probe fails.

        Raises:
            WeightsRefused: if nothing of this revision is staged, or the probe fails.
            EngineUnavailable: if the engine is not up.
        """
        self._require_up()
        async with self._updating:
            if self._staged is None or self._staged.revision != revision:
                raise WeightsRefused("the new weights are not staged any more; begin the update again")
            staged, self._staged = self._staged, None
            try:
                await self._swap.commit(staged, partial(self._check, staged.probe))
            except WeightsRefused:
                self._history.forget(staged)
                raise

    async def rollback(self) -> None:
        """Discard the staged weights; the served weights stay."""
        self._require_up()
        async with self._updating:
            self._drop_file()
            await self._swap.drop()

    async def _check(self, probe: WeightProbe | None, serving: Serving) -> None:
        """Score a probe without the lock, which the caller holds or does not need."""
        rewards = await self._pooling.rewards(probe_sequences(probe, self.description.max_length), serving.adapter)
        check_rewards(rewards, probe, self.description.dtype)

    def _drop_file(self) -> None:
        if self._staged is not None:
            self._history.forget(self._staged)
            self._staged = None

    def _require_up(self) -> None:
        if not self.is_up:
            raise EngineUnavailable("vLLM's engine has stopped; its supervisor starts another")
