"""The weights of a served model: what an update must bring, reading and checking it, and the swap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from rm_optimizer.core.adapter_files import adapter_tensor_names
from rm_optimizer.core.adapters import has_adapter
from rm_optimizer.core.head import head_name
from rm_optimizer.serving.engine import WeightsRefused
from rm_optimizer.serving.packed_linear import PackedLinear, pack
from rm_optimizer.serving.protocol import RewardModelTrainingMode, TensorSpec

_SAMPLE = 64
"""Values of each end of a tensor that identify it."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def state_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that score, by name, as they are held."""
    return dict(model.state_dict(keep_vars=True))


def names_of_mode(model: PreTrainedModel, mode: RewardModelTrainingMode) -> frozenset[str]:
    """Names of the tensors that an update of this mode brings, all of them and no other.

    Raises:
        WeightsRefused: if the model has no adapter and the mode is `lora`.
    """
    if mode is RewardModelTrainingMode.full:
        return frozenset(state_tensors(model))
    if mode is RewardModelTrainingMode.head_only:
        head = head_name(model)
        return frozenset(f"{head}.{key}" for key in model.get_submodule(head).state_dict())
    if not has_adapter(model):
        raise WeightsRefused("mode lora needs a served model with a LoRA adapter; serve the adapter's folder")
    return adapter_tensor_names(model)


def tensor_specs(model: PreTrainedModel, mode: RewardModelTrainingMode) -> tuple[TensorSpec, ...]:
    """What an update of this mode brings, by name; empty where the model has no such tensors."""
    if mode is RewardModelTrainingMode.lora and not has_adapter(model):
        return ()
    state = state_tensors(model)
    return tuple(
        TensorSpec(name=name, shape=list(state[name].shape), dtype=dtype_name(state[name].dtype))
        for name in sorted(names_of_mode(model, mode))
    )


def fingerprint(model: PreTrainedModel) -> str:
    """16 hexadecimal digits that tell weights apart, from both ends of every tensor, rounded to bfloat16."""
    return fingerprint_of(sorted(model.state_dict().items()))


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The `fingerprint` of a model with these tensors, which come in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        ends = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]]).cpu().to(torch.bfloat16).float()
        digest.update(name.encode() + ends.numpy().tobytes())
    return digest.hexdigest()[:16]


def tensor_sha256(tensor: Tensor) -> str:
    """Hexadecimal SHA-256 of a tensor's contiguous bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


@dataclass(frozen=True)
class Update:
    """New tensors beside the old, ready to be swapped in.

    Args:
        tensors: by name, in the type and on the device of those they replace.
        packed: oneDNN's copies of them, by the name of their layer.
    """

    tensors: Mapping[str, Tensor]
    packed: Mapping[str, Tensor]


def read_update(
    model: PreTrainedModel, file: Path, specs: Iterable[TensorSpec], mode: RewardModelTrainingMode
) -> Update:
    """Read and check a safetensors file against its manifest and the model, which stays as it is.

    Raises:
        WeightsRefused: naming what is missing, extra, of another shape or type, altered or not finite.
    """
    state, manifest = state_tensors(model), {spec.name: spec for spec in specs}
    _check_names(names_of_mode(model, mode), set(manifest), f"an update of mode {mode.value}")
    try:
        with safe_open(file, framework="pt") as stored:
            _check_names(set(manifest), set(stored.keys()), "the update's file")
            tensors = {name: _checked(stored.get_tensor(name), spec, state) for name, spec in manifest.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"the update's file cannot be read as safetensors: {error}") from error
    return Update(tensors, _packed(model, tensors))


def _check_names(expected: frozenset[str] | set[str], got: set[str], what: str) -> None:
    for word, names in (("lacks", expected - got), ("has unknown", got - expected)):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise WeightsRefused(f"{what} {word} {len(names)} tensor{'s' * (len(names) > 1)}: {shown}")


def _checked(tensor: Tensor, spec: TensorSpec, state: Mapping[str, Tensor]) -> Tensor:
    target = state[spec.name]
    if list(tensor.shape) != spec.shape or tensor.shape != target.shape:
        raise WeightsRefused(
            f"{spec.name}: expected shape {list(target.shape)}, got {list(tensor.shape)} (manifest: {spec.shape})"
        )
    if dtype_name(tensor.dtype) != spec.dtype or tensor.is_floating_point() != target.is_floating_point():
        raise WeightsRefused(f"{spec.name}: expected {spec.dtype}, got {dtype_name(tensor.dtype)}")
    if spec.sha256 is not None and tensor_sha256(tensor) != spec.sha256:
        raise WeightsRefused(f"{spec.name}: its SHA-256 is not the manifest's; it was altered or torn on the way")
    own = tensor.to(device=target.device, dtype=target.dtype, copy=True)
    if own.is_floating_point() and not bool(own.isfinite().all()):
        raise WeightsRefused(f"{spec.name}: holds values that are not finite")
    return own


def _packed(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    return {name: pack(tensors[f"{name}.weight"]) for name in layers if f"{name}.weight" in tensors}


@torch.no_grad()
def swap(model: PreTrainedModel, update: Update) -> Update:
    """Put an update in and return what it replaced; pointers move, no number is copied."""
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
