"""Weights of a served model: the tensors of each update mode, their checks, the swap, and packed copies."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.classifier.head import head_name
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.storage.adapter_files import adapter_tensor_names
from rm_optimizer.core.storage.model_files import DIGESTS, weight_digests
from rm_optimizer.errors import WeightsRefused
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.weights.weight_file import check_names, check_weight_file, opened

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-7}
"""Largest difference from `F.linear` relative to the largest output, from another order of summation, by type."""
PROBE_ROWS = 256


class PackedLinear(nn.Linear):
    """Linear layer that computes with a packed copy of its weight; its state equals `nn.Linear`'s."""

    packed: Tensor

    @classmethod
    def of(cls, plain: nn.Linear) -> PackedLinear:
        """Packed layer with the same parameters."""
        layer = cls(plain.in_features, plain.out_features, plain.bias is not None, "meta", plain.weight.dtype)
        layer.weight, layer.bias = plain.weight, plain.bias
        layer.packed = pack(plain.weight)
        return layer.train(plain.training)

    def forward(self, input: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """`input @ weight.T + bias`, forward only."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output


def pack(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Copy of the weight in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def packing_gain(layer: nn.Linear) -> float:
    """Speed-up of the packed layer; 0 if it cannot be packed, or its numbers differ."""
    rows = torch.randn(1, PROBE_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(layer.weight.dtype)
    try:
        packed = PackedLinear.of(layer)
        with torch.inference_mode():
            expected = layer(rows)
            if not (packed(rows) - expected).abs().max() <= TOLERANCES[rows.dtype] * expected.abs().max():
                return 0.0
            return _seconds(lambda: layer(rows)) / _seconds(lambda: packed(rows))
    except (RuntimeError, AttributeError, NotImplementedError):  # this build of PyTorch has no such operator
        return 0.0


def _seconds(compute: Callable[[], Tensor], repeats: int = 15) -> float:
    """Least processor time of a call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        compute()
        times.append(time.process_time() - started)
    return min(times[1:])


def packable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers on the CPU in a type that can be packed, with more than one output, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.out_features > 1
        and module.weight.dtype in TOLERANCES
        and module.weight.device.type == "cpu"
    }


def install_packed_linears(model: nn.Module, *, least_gain: float) -> bool:
    """Replace the linear layers by packed ones if the largest of them gains; True if they were replaced.

    Args:
        model: model, changed in place.
        least_gain: least speed-up of the largest layer.
    """
    layers = packable_layers(model)
    largest = max(layers.values(), key=lambda layer: layer.weight.numel(), default=None)
    if largest is None or packing_gain(largest) < least_gain:
        return False
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear.of(layer))
    return True


def state_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that compute rewards, by name, without copies."""
    return dict(model.state_dict(keep_vars=True))


def names_of_mode(model: PreTrainedModel, mode: RewardModelTrainingMode) -> frozenset[str]:
    """Names of the tensors in an update of this mode; without an adapter mode `lora` has none."""
    if mode is RewardModelTrainingMode.full:
        return frozenset(state_tensors(model))
    if mode is RewardModelTrainingMode.head_only:
        head = head_name(model)
        return frozenset(f"{head}.{key}" for key in model.get_submodule(head).state_dict())
    return adapter_tensor_names(model) if has_adapter(model) else frozenset()


def tensor_specs(model: PreTrainedModel, mode: RewardModelTrainingMode) -> tuple[TensorSpec, ...]:
    """Specifications of the tensors in an update of this mode, by name; empty if the model has none."""
    state = state_tensors(model)
    return tuple(
        TensorSpec(name=name, shape=list(state[name].shape), dtype=dtype_name(state[name].dtype))
        for name in sorted(names_of_mode(model, mode))
    )


def checkpoint_version(model: PreTrainedModel, folder: Path | None, record: Mapping[str, Any]) -> str:
    """Fingerprint of a checkpoint, 16 hexadecimal digits.

    Args:
        model: loaded checkpoint, whose values are hashed if there are no files.
        folder: folder with all of its weights; None if they are not in one folder.
        record: `export.json` of the folder; newer ones hold the digests of the files.
    """
    digests = record.get(DIGESTS) or (weight_digests(folder) if folder is not None else {})
    if not digests:
        digests = {name: tensor_sha256(tensor) for name, tensor in model.state_dict().items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


def tensor_sha256(tensor: Tensor) -> str:
    """Hexadecimal SHA-256 of a tensor's contiguous bytes."""
    return hashlib.sha256(as_bytes(tensor).cpu().numpy().data).hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """Contiguous bytes of a tensor, flat."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Update:
    """New tensors, ready for the swap with the old ones.

    Args:
        tensors: new tensors by name, in the type and on the device of those they replace.
        packed: oneDNN's copies of the tensors, by name of the layer.
    """

    tensors: Mapping[str, Tensor]
    packed: Mapping[str, Tensor]


def read_update(
    model: PreTrainedModel, file: Path, specs: Sequence[TensorSpec], mode: RewardModelTrainingMode
) -> Update:
    """Read a safetensors file and check it against its manifest and the model, which stays unchanged.

    Raises:
        WeightsRefused: naming what is missing, extra, of another shape or type, altered or not finite.
    """
    state = state_tensors(model)
    check_names(set(names_of_mode(model, mode)), {spec.name for spec in specs}, f"an update of mode {mode.value}")
    tensors = dict[str, Tensor]()
    for name, tensor in checked_tensors(file, specs):
        target = state[name]
        if tensor.shape != target.shape:
            raise WeightsRefused(f"{name}: expected shape {list(target.shape)}, got {list(tensor.shape)}")
        if tensor.is_floating_point() != target.is_floating_point():
            raise WeightsRefused(f"{name}: expected {dtype_name(target.dtype)}, got {dtype_name(tensor.dtype)}")
        tensors[name] = tensor.to(device=target.device, dtype=target.dtype, copy=True)
        if not bool(tensors[name].isfinite().all()):
            raise WeightsRefused(f"{name}: holds values that are not finite in {dtype_name(target.dtype)}")
    layers = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    return Update(tensors, {name: pack(tensors[f"{name}.weight"]) for name in layers if f"{name}.weight" in tensors})


def checked_tensors(file: Path, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file one at a time, checked against its manifest and for finite values.

    Raises:
        WeightsRefused: naming what is missing, extra, of another shape or type, altered, cut off or not finite.
    """
    check_weight_file(file, specs)
    with opened(file) as stored:
        for spec in specs:
            tensor = stored.get_tensor(spec.name)
            if spec.sha256 is not None and tensor_sha256(tensor) != spec.sha256:
                raise WeightsRefused(
                    f"{spec.name}: its SHA-256 is not the manifest's; it was altered or cut off in transit"
                )
            if not bool(tensor.isfinite().all()):
                raise WeightsRefused(f"{spec.name}: holds values that are not finite")
            yield spec.name, tensor


@torch.no_grad()
def swap(model: PreTrainedModel, update: Update) -> Update:
    """Swap in an update and return the replaced tensors; only pointers move."""
    state = state_tensors(model)
    replaced = Update(
        {name: state[name].data for name in update.tensors},
        {name: model.get_submodule(name).packed for name in update.packed},
    )
    for name, tensor in update.tensors.items():
        state[name].data = tensor
    for name, packed in update.packed.items():
        model.get_submodule(name).packed = packed
    return replaced
