"""Engines inside vLLM's server: rewards from its scheduler, one version an answer, and weight updates.

A plain classifier is updated by a reload between two batches, a model with an adapter by a further adapter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rm_optimizer.core.storage.adapter_files import WEIGHTS_FILE, stored_name
from rm_optimizer.errors import EngineUnavailable, WeightsRefused
from rm_optimizer.records.locations import ADAPTER_FILE
from rm_optimizer.serving.engine import (
    Engine,
    ScoredBatch,
    StagedWeights,
    WeightHistory,
    check_rewards,
    probe_sequences,
)
from rm_optimizer.serving.vllm.folder import require_unchanged
from rm_optimizer.serving.vllm.supervisor import VllmSettings
from rm_optimizer.serving.vllm.worker import latest_tensors
from rm_optimizer.serving.weights.live_weights import checked_tensors

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest

KEPT_ADAPTERS = 8
"""Adapters kept on disk, since vLLM reads an evicted one again when a batch needs it."""
WATCH_SECONDS = 5.0
"""Seconds between two checks that the engine is alive."""
SILENCE_SECONDS = 60.0
"""Longest time for its answer in seconds, since it answers between two passes."""
HUNG_EXIT_CODE = 70
UPDATE_SECONDS = 600.0
"""Time limit of the workers for one step of an update, in seconds."""
_log = logging.getLogger("rm_optimizer")


class ReadWriteLock:
    """Lock for many readers or one writer; who comes after a waiting writer waits behind it.

    A reader sees one version of the weights from its entrance to its exit.
    """

    def __init__(self) -> None:
        self._entrance = asyncio.Lock()  # which lets tasks through in the order of their arrival
        self._readers = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold the lock as a reader, once the writers before it have left."""
        async with self._entrance:
            self._readers += 1
            self._is_empty.clear()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._is_empty.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold the lock as the only writer, once the readers have left; new readers wait."""
        async with self._entrance:
            await self._is_empty.wait()
            yield


class VllmEngine(Engine):
    """Engine on vLLM's own engine client; a failed one ends its server, and a supervisor starts another.

    Args:
        client: engine client of the surrounding vLLM server.
        settings: settings of the served model.
    """

    def __init__(self, client: EngineClient, settings: VllmSettings) -> None:
        super().__init__(WeightHistory(settings.history_folder))
        budget = client.vllm_config.scheduler_config.max_num_batched_tokens
        self._description = replace(settings.model.description, token_budget=budget)
        self._serve_checkpoint()
        self.num_restarts = settings.num_restarts
        self.client = client
        self._adapter: LoRARequest | None = None
        self._lock = ReadWriteLock()
        self._is_ended = False
        self._num_updating = 0
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """True while the engine's processes run with valid weights."""
        return not self._is_ended and not self.client.errored

    async def start(self) -> None:
        """Serve the checkpoint's own weights, which vLLM has loaded.

        Raises:
            CheckpointError: if they differ from the server's first start.
        """
        self._watcher = asyncio.create_task(self.watch(), name="rm-vllm-watch")

    async def stop(self) -> None:
        """Accept no more batches; vLLM's server ends the engine."""
        self._is_ended = True
        if self._watcher is not None:
            self._watcher.cancel()

    async def score(self, sequences: Sequence[Sequence[int]], group_sizes: Sequence[int] | None = None) -> ScoredBatch:
        """Rewards of the sequences; vLLM's prefix cache finds common starts by itself. See `Engine.score`."""
        self._require_up()
        async with self._lock.reading():
            version, revision = self.version, self.revision
            return ScoredBatch(await self.rewards(sequences, self._adapter), version, revision)

    def give_up(self) -> None:
        """End the server, whose weights are in an unknown state; its supervisor starts another."""
        self._is_ended = True
        os.kill(os.getpid(), signal.SIGTERM)

    async def watch(self, every: float = WATCH_SECONDS, silence: float = SILENCE_SECONDS) -> None:
        """End this process when the engine does not answer any more; its supervisor starts another.

        vLLM does not detect a stopped or hung engine, and its orderly shutdown would wait for it. The check calls the
        workers, since the engine's core still answers while they hang.

        Args:
            every: seconds between two checks.
            silence: longest time for an answer, in seconds.
        """
        while self.is_up:
            await asyncio.sleep(every)
            asked = asyncio.ensure_future(self.client.collective_rpc("rm_alive"))
            await asyncio.wait({asked}, timeout=silence)
            if asked.done():
                asked.exception()  # marks the exception as retrieved; a dead engine ends the loop
            elif not self._num_updating:
                _log.error("vLLM's engine gave no sign of life for %.0f s; its server ends", silence)
                os._exit(HUNG_EXIT_CODE)

    async def rewards(self, sequences: Sequence[Sequence[int]], adapter: LoRARequest | None) -> tuple[float, ...]:
        """Raw rewards of the sequences, no activation applied.

        When this returns or raises, none of the sequences is in the engine any more.

        Raises:
            EngineUnavailable: if the engine has died or was ended.
        """
        self._require_up()

        async def reward(sequence: Sequence[int]) -> float:
            from vllm import PoolingParams
            from vllm.inputs.engine import tokens_input

            name, how = f"reward-{uuid.uuid4().hex}", PoolingParams(task="classify", use_activation=False)
            async for answer in self.client.encode(tokens_input(list(sequence)), how, name, lora_request=adapter):
                if answer.finished:
                    return float(answer.outputs.data.reshape(()))
            raise EngineUnavailable("vLLM's engine ended a sequence without its reward")

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reward(sequence)) for sequence in sequences]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise EngineUnavailable(f"vLLM did not score a batch: {type(first).__name__}: {first}") from failures
        return tuple(task.result() for task in tasks)

    async def ask_workers(self, method: str, *arguments: Any) -> str | None:
        """Call a method of `RewardWorkerExtension` in every worker; return the first error, or None.

        Raises:
            TimeoutError: if a worker did not finish in time.
        """
        self._num_updating += 1
        try:
            async with asyncio.timeout(UPDATE_SECONDS):
                answers: list[str | None] = await self.client.collective_rpc(method, args=arguments)
        finally:
            self._num_updating -= 1
        return next((answer for answer in answers if answer is not None), None)

    async def _check(self, weights: StagedWeights, adapter: LoRARequest | None) -> None:
        """Score the probe without the lock, which the caller holds or does not need."""
        sequences = probe_sequences(weights.probe, self.description.max_length)
        check_rewards(await self.rewards(sequences, adapter), weights.probe, self.description.dtype)

    def _serve(self, weights: StagedWeights, adapter: LoRARequest | None = None) -> None:
        self._history.remember(weights)
        self.version, self.revision, self._adapter = weights.version, weights.revision, adapter

    def _require_up(self) -> None:
        if not self.is_up:
            raise EngineUnavailable("vLLM's engine has stopped; its supervisor starts another")


class ReloadEngine(VllmEngine):
    """Engine with updates by reload: drain, load the tensors, clear the prefix cache, admit."""

    def __init__(self, client: EngineClient, settings: VllmSettings) -> None:
        super().__init__(client, settings)
        self._checkpoint = sorted(str(file) for file in settings.model.folder.glob("*.safetensors"))
        self._verify = partial(require_unchanged, settings.model)

    async def start(self) -> None:
        """Serve the checkpoint, after a check of its files; see `VllmEngine.start`."""
        await asyncio.to_thread(self._verify)
        await super().start()

    async def _restore(self) -> None:
        """Load the checkpoint with the updates on top."""
        await self._in_pause("rm_restore", [*self._checkpoint, *self._history.files])
        await asyncio.to_thread(self._verify)

    async def _read(self, weights: StagedWeights) -> None:
        self._require_up()
        specs = [spec.model_dump() for spec in weights.tensors]
        _require(await self.ask_workers("rm_stage", str(weights.file), specs))

    async def _swap_in(self, weights: StagedWeights) -> None:
        """Load between two batches; no request is answered meanwhile.

        An engine with neither the new weights nor its old ones is ended; its supervisor starts another.
        """
        self._require_up()
        async with self._lock.writing():
            is_sound = False
            try:
                try:
                    _require(await self._in_pause("rm_commit"))
                    await self._check(weights, None)
                except WeightsRefused:
                    await self._restore()
                    is_sound = True
                    raise
                self._serve(weights)
                is_sound = True
            finally:
                if not is_sound:
                    self.give_up()

    async def _in_pause(self, method: str, *arguments: list[str]) -> str | None:
        """Call the workers while nothing is computed, with a clear prefix cache."""
        client = self.client
        await client.pause_generation(mode="wait", clear_cache=True)  # vLLM's default, abort, ends an engine that pools
        complaint = await self.ask_workers(method, *arguments)
        await client.resume_generation()
        return complaint

    async def _discard(self) -> None:
        self._require_up()
        await self.ask_workers("rm_drop")


class AdapterEngine(VllmEngine):
    """Engine with updates by LoRA adapters, one for each version; a batch ends with the adapter it began with.

    An adapter's name is its version and a number, since vLLM looks up cached prefixes by the name.
    """

    def __init__(self, client: EngineClient, settings: VllmSettings) -> None:
        super().__init__(client, settings)
        assert settings.model.adapter is not None
        self._first, self._folder, self._count = settings.model.adapter, settings.adapters_folder, 0
        self._tensors: Mapping[str, Tensor] = {}
        shutil.rmtree(self._folder, ignore_errors=True)  # adapters of an earlier process

    async def start(self) -> None:
        """Load the first adapter; see `VllmEngine.start`."""
        self._adapter = await self._loaded(self.version, self._first)
        await super().start()

    async def _restore(self) -> None:
        """Load the first adapter with the updates in it."""
        tensors = dict(latest_tensors(self._history.files))
        self._adapter = await self._loaded(self.committed[-1].version, self._written(tensors))

    async def _read(self, weights: StagedWeights) -> None:
        self._require_up()
        self._tensors = await asyncio.to_thread(lambda: dict(checked_tensors(weights.file, weights.tensors)))

    async def _swap_in(self, weights: StagedWeights) -> None:
        """Load a further adapter: the served one with the update's tensors in it."""
        self._require_up()
        tensors, self._tensors = self._tensors, {}
        adapter = await self._loaded(weights.version, self._written(tensors))
        try:
            await self._check(weights, adapter)
        except WeightsRefused:
            await self.client.remove_lora(self._count)
            raise
        self._serve(weights, adapter)
        for folder in self._folder.iterdir():  # no batch can use these any more
            if int(folder.name) <= self._count - KEPT_ADAPTERS:
                shutil.rmtree(folder, ignore_errors=True)

    async def _discard(self) -> None:
        self._require_up()
        self._tensors = {}

    async def _loaded(self, version: str, folder: Path) -> LoRARequest:
        """Load the adapter of a folder in addition to the others."""
        from vllm.lora.request import LoRARequest

        self._count += 1
        request = LoRARequest(f"{version}#{self._count}", self._count, str(folder))
        arguments = (request.lora_name, request.lora_int_id, request.lora_path)
        _require(await self.ask_workers("rm_add_adapter", *arguments))
        return request

    def _written(self, tensors: Mapping[str, Tensor]) -> Path:
        """Folder of a new adapter: the served one with these tensors in it."""
        assert self._adapter is not None
        served = Path(self._adapter.lora_path)
        folder = self._folder / str(self._count + 1)
        folder.mkdir(parents=True)
        shutil.copyfile(self._first / ADAPTER_FILE, folder / ADAPTER_FILE)
        renamed = {stored_name(name): tensor for name, tensor in tensors.items()}
        save_file(load_file(served / WEIGHTS_FILE) | renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return folder


def vllm_engine(client: EngineClient, settings: VllmSettings) -> VllmEngine:
    """Engine for the served model: with an adapter, only the adapter is exchanged."""
    return ReloadEngine(client, settings) if settings.model.adapter is None else AdapterEngine(client, settings)


def _require(complaint: str | None) -> None:
    if complaint is not None:
        raise WeightsRefused(complaint)
