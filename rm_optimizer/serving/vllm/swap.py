"""Weight updates of a running vLLM: reload of the model between two batches, or a further adapter."""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from torch import Tensor

from rm_optimizer.core.storage.adapter_files import WEIGHTS_FILE, stored_name
from rm_optimizer.errors import WeightsRefused
from rm_optimizer.records.locations import ADAPTER_FILE
from rm_optimizer.serving.engine import StagedWeights, new_revision
from rm_optimizer.serving.vllm.pooling import Pooling, ReadWriteLock
from rm_optimizer.serving.vllm.worker import latest_tensors
from rm_optimizer.serving.weights.live_weights import checked_tensors
from rm_optimizer.serving.weights.weight_history import WeightHistory

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


KEPT_ADAPTERS = 8
"""Adapters kept on disk, since vLLM reads an evicted one again when a batch needs it."""


@dataclass(frozen=True)
class Serving:
    """Weights that answer a batch.

    Args:
        version: name of the weights.
        revision: their serial number.
        adapter: vLLM's handle of the adapter; None for the model's own weights.
    """

    version: str
    revision: int
    adapter: LoRARequest | None = None


Check = Callable[[Serving], Awaitable[None]]
"""Function that scores an update's probe with the new weights; raises `WeightsRefused`."""


class Swap(ABC):
    """Holder of the served weights, which exchanges them.

    Args:
        serving: first weights.
        pooling: the engine.
        history: updates that are served.
    """

    def __init__(self, serving: Serving, pooling: Pooling, history: WeightHistory) -> None:
        self.serving, self._pooling, self._history = serving, pooling, history

    async def start(self) -> None:  # noqa: B027 - the server loads a checkpoint itself
        """Make the first weights available."""

    @abstractmethod
    async def restore(self) -> None:
        """Apply the updates of the history."""

    @abstractmethod
    async def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights while the old ones serve.

        Raises:
            WeightsRefused: if a check fails.
        """

    @abstractmethod
    async def commit(self, weights: StagedWeights, check: Check) -> None:
        """Exchange the weights, and record them in the history.

        Raises:
            WeightsRefused: if vLLM cannot load them or the check fails; the old weights are served then.
        """

    @abstractmethod
    async def drop(self) -> None:
        """Discard the staged weights."""


class ReloadSwap(Swap):
    """Update by reload: drain, load the tensors, clear the prefix cache, admit.

    Args:
        pooling: the engine.
        lock: lock that scoring holds as a reader.
        history: updates that are served.
        checkpoint: folder of the served model.
        version: version of its weights.
        verify: function that raises `CheckpointError` if the folder is not the one that this version names.
    """

    def __init__(
        self,
        pooling: Pooling,
        lock: ReadWriteLock,
        history: WeightHistory,
        *,
        checkpoint: Path,
        version: str,
        verify: Callable[[], None],
    ) -> None:
        super().__init__(Serving(version, new_revision()), pooling, history)
        self._lock = lock
        self._checkpoint = sorted(str(file) for file in checkpoint.glob("*.safetensors"))
        self._verify = verify

    async def start(self) -> None:
        """Verify the files that vLLM has loaded."""
        await asyncio.to_thread(self._verify)

    async def restore(self) -> None:
        """Load the checkpoint with the updates on top."""
        await self._restore()
        last = self._history.committed[-1]
        self.serving = Serving(last.version, last.revision)

    async def stage(self, weights: StagedWeights) -> None:
        """Let every worker read and check the file."""
        specs = [spec.model_dump() for spec in weights.tensors]
        _require(await self._pooling.ask_workers("rm_stage", str(weights.file), specs))

    async def commit(self, weights: StagedWeights, check: Check) -> None:
        """Load between two batches; no request is answered meanwhile.

        An engine with neither the new weights nor its old ones is ended; its supervisor starts another.
        """
        async with self._lock.writing():
            is_sound = False
            try:
                await self._load(weights, check)
                is_sound = True
            except WeightsRefused:
                is_sound = True
                raise
            finally:
                if not is_sound:
                    self._pooling.give_up()

    async def _load(self, weights: StagedWeights, check: Check) -> None:
        serving = Serving(weights.version, weights.revision)
        try:
            _require(await self._in_pause("rm_commit"))
            await check(serving)
        except WeightsRefused:
            await self._restore()
            raise
        self._history.remember(weights)
        self.serving = serving

    async def _restore(self) -> None:
        await self._in_pause("rm_restore", [*self._checkpoint, *self._history.files])
        await asyncio.to_thread(self._verify)

    async def _in_pause(self, method: str, *arguments: list[str]) -> str | None:
        """Call the workers while nothing is computed, with a clear prefix cache."""
        client = self._pooling.client
        await client.pause_generation(mode="wait", clear_cache=True)  # vLLM's default, abort, ends an engine that pools
        complaint = await self._pooling.ask_workers(method, *arguments)
        await client.resume_generation()
        return complaint

    async def drop(self) -> None:
        """Let every worker discard the weights it has read."""
        await self._pooling.ask_workers("rm_drop")


class AdapterSwap(Swap):
    """Update by LoRA adapters, one for each version; a batch ends with the adapter it began with.

    An adapter's name is its version and a number, since vLLM looks up cached prefixes by the name.

    Args:
        pooling: the engine.
        adapter: folder of the first adapter, in peft's form.
        folder: folder for the adapters of updates; files of an earlier process are removed.
        history: updates that are served.
        version: version of the first adapter.
    """

    def __init__(self, pooling: Pooling, history: WeightHistory, *, adapter: Path, folder: Path, version: str) -> None:
        self._first, self._folder, self._count = adapter, folder, 0
        self._staged: Mapping[str, Tensor] = {}
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(Serving(version, new_revision(), self._request(version, adapter)), pooling, history)

    async def start(self) -> None:
        """Load the first adapter."""
        assert self.serving.adapter is not None
        await self._load(self.serving.adapter)

    async def restore(self) -> None:
        """Load the first adapter with the updates in it."""
        last = self._history.committed[-1]
        self.serving = await self._added(last, dict(latest_tensors(self._history.files)))

    async def stage(self, weights: StagedWeights) -> None:
        """Read and check the file."""
        self._staged = await asyncio.to_thread(lambda: dict(checked_tensors(weights.file, weights.tensors)))

    async def commit(self, weights: StagedWeights, check: Check) -> None:
        """Load a further adapter: the served one with the update's tensors in it."""
        tensors, self._staged = self._staged, {}
        serving = await self._added(weights, tensors)
        try:
            await check(serving)
        except WeightsRefused:
            await self._pooling.client.remove_lora(self._count)
            raise
        self._history.remember(weights)
        self.serving = serving
        for folder in self._folder.iterdir():  # no batch can use these any more
            if int(folder.name) <= self._count - KEPT_ADAPTERS:
                shutil.rmtree(folder, ignore_errors=True)

    async def _added(self, weights: StagedWeights, tensors: Mapping[str, Tensor]) -> Serving:
        """Load a further adapter: the served one with these tensors in it."""
        request = self._request(weights.version, self._written(tensors))
        await self._load(request)
        return Serving(weights.version, weights.revision, request)

    async def _load(self, request: LoRARequest) -> None:
        arguments = (request.lora_name, request.lora_int_id, request.lora_path)
        _require(await self._pooling.ask_workers("rm_add_adapter", *arguments))

    def _written(self, tensors: Mapping[str, Tensor]) -> Path:
        """Folder of a new adapter: the served one with these tensors in it."""
        assert self.serving.adapter is not None
        served = Path(self.serving.adapter.lora_path)
        folder = self._folder / str(self._count + 1)
        folder.mkdir(parents=True)
        shutil.copyfile(self._first / ADAPTER_FILE, folder / ADAPTER_FILE)
        renamed = {stored_name(name): tensor for name, tensor in tensors.items()}
        save_file(load_file(served / WEIGHTS_FILE) | renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return folder

    async def drop(self) -> None:
        """Discard the staged tensors."""
        self._staged = {}

    def _request(self, version: str, folder: Path) -> LoRARequest:
        from vllm.lora.request import LoRARequest

        self._count += 1
        return LoRARequest(f"{version}#{self._count}", self._count, str(folder))


def _require(complaint: str | None) -> None:
    if complaint is not None:
        raise WeightsRefused(complaint)
