"""Engine inside vLLM's server: rewards from its scheduler, one version an answer, and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rm_optimizer.errors import EngineUnavailable
from rm_optimizer.serving.engine import EngineDescription, ScoredBatch, StagedWeights, check_rewards, probe_sequences
from rm_optimizer.serving.update_protocol import WeightProbe
from rm_optimizer.serving.vllm.folder import require_unchanged
from rm_optimizer.serving.vllm.pooling import Pooling, ReadWriteLock
from rm_optimizer.serving.vllm.supervisor import VllmSettings
from rm_optimizer.serving.vllm.swap import AdapterSwap, ReloadSwap, Serving, Swap
from rm_optimizer.serving.weights.weight_history import UpdatableEngine, WeightHistory

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class VllmEngine(UpdatableEngine):
    """Engine that scores through vLLM's own engine client.

    Args:
        client: engine client of the surrounding vLLM server.
        settings: settings of the served model.
    """

    def __init__(self, client: EngineClient, settings: VllmSettings) -> None:
        super().__init__(WeightHistory(settings.history_folder))
        scheduler = client.vllm_config.scheduler_config
        self.description: EngineDescription = replace(
            settings.model.description, token_budget=scheduler.max_num_batched_tokens
        )
        self.num_restarts = settings.num_restarts
        self.failure: str | None = None  # a failed engine ends its server, and the supervisor starts another
        self._pooling = Pooling(client)
        self._lock = ReadWriteLock()
        self._swap = self._make_swap(settings)
        self._is_stopped = False
        self._watcher: asyncio.Task[None] | None = None

    def _make_swap(self, settings: VllmSettings) -> Swap:
        version, model = self.description.version, settings.model
        if model.adapter is None:
            return ReloadSwap(
                self._pooling,
                self._lock,
                self._history,
                checkpoint=model.folder,
                version=version,
                verify=partial(require_unchanged, model),
            )
        folder = settings.adapters_folder
        return AdapterSwap(self._pooling, self._history, adapter=model.adapter, folder=folder, version=version)

    @property
    def version(self) -> str:
        """Name of the weights that answer the next batch."""
        return self._swap.serving.version

    @property
    def revision(self) -> int:
        """Serial number of the weights that answer the next batch."""
        return self._swap.serving.revision

    @property
    def is_up(self) -> bool:
        """True while the engine's processes run."""
        return not self._is_stopped and self._pooling.is_up

    async def start(self) -> None:
        """Serve the checkpoint's own weights, which vLLM has loaded.

        Raises:
            CheckpointError: if they differ from the server's first start.
        """
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
        """Rewards of the sequences; vLLM's prefix cache finds common starts by itself. See `Engine.score`."""
        self._require_up()
        async with self._lock.reading():
            serving = self._swap.serving
            rewards = await self._pooling.rewards(sequences, serving.adapter)
            return ScoredBatch(rewards, serving.version, serving.revision)

    async def _read(self, weights: StagedWeights) -> None:
        self._require_up()
        await self._swap.stage(weights)

    async def _swap_in(self, weights: StagedWeights) -> None:
        self._require_up()
        await self._swap.commit(weights, partial(self._check, weights.probe))

    async def _discard(self) -> None:
        self._require_up()
        await self._swap.drop()

    async def _check(self, probe: WeightProbe | None, serving: Serving) -> None:
        """Score a probe without the lock, which the caller holds or does not need."""
        rewards = await self._pooling.rewards(probe_sequences(probe, self.description.max_length), serving.adapter)
        check_rewards(rewards, probe, self.description.dtype)

    def _require_up(self) -> None:
        if not self.is_up:
            raise EngineUnavailable("vLLM's engine has stopped; its supervisor starts another")
