"""Extension of vLLM's worker: check new weights without changing the model, load all of them, or restore the old ones.

Loading into the live model by parts would leave a mixture if a part fails, which always happens on a CPU, since the
linear layers are packed. Therefore everything is read and checked first, and loaded through vLLM's own reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rm_optimizer.errors import WeightsRefused
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.weights.live_weights import checked_tensors
from rm_optimizer.serving.weights.weight_file import tensor_files


def latest_tensors(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files by name; a later file takes precedence."""
    holders = tensor_files(files)
    for file in dict.fromkeys(holders.values()):
        with safe_open(file, framework="pt") as stored:
            for name in (name for name, holder in holders.items() if holder == file):
                yield name, stored.get_tensor(name)


class RewardWorkerExtension:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`); the server calls them by `collective_rpc`.

    They return None, or the reason of a failure in words: an exception in a worker ends the engine.
    """

    _rm_staged: Mapping[str, Tensor] | None = None

    def rm_stage(self, file: str, specs: list[dict[str, Any]]) -> str | None:
        """Read and check new weights; the model stays unchanged."""
        self._rm_staged = None
        try:
            self._rm_staged = dict(checked_tensors(Path(file), [TensorSpec(**spec) for spec in specs]))
        except WeightsRefused as error:
            return str(error)
        return None

    def rm_commit(self) -> str | None:
        """Load the staged weights; after a failure the model is a mixture until `rm_restore`."""
        tensors, self._rm_staged = self._rm_staged, None
        if tensors is None:
            return "no weights are staged; begin the update again"
        try:
            self._rm_load(iter(tensors.items()))
        except (RuntimeError, ValueError, KeyError, AttributeError, AssertionError) as error:
            return f"vLLM cannot load the new weights: {type(error).__name__}: {error}"
        return None

    def rm_restore(self, last_good: list[str]) -> None:
        """Load the weights that were served before, from their files, oldest first."""
        self._rm_load(latest_tensors(last_good))

    def rm_add_adapter(self, name: str, number: int, folder: str) -> str | None:
        """Load a LoRA adapter in addition to the others."""
        from vllm.exceptions import VLLMError
        from vllm.lora.request import LoRARequest

        try:
            self.add_lora(LoRARequest(name, number, folder))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError, KeyError, AttributeError, AssertionError, OSError, VLLMError) as error:
            return f"vLLM cannot load the adapter: {type(error).__name__}: {error}"
        return None

    def rm_alive(self) -> None:
        """Return between two passes, as a sign of life."""

    def rm_drop(self) -> None:
        """Discard the staged weights."""
        self._rm_staged = None

    def _rm_load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
