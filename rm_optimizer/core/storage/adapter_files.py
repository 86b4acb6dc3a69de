"""Adapters on disk: peft's own two files with the reward head inside, and the base weights with the adapter merged."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.adapters import (
    ADAPTER_NAME,
    attach,
    has_adapter,
    import_peft,
    is_under,
    lora_config,
    modules_named,
    require_exact,
    saved_modules,
)
from rm_optimizer.core.classifier.head import head_name
from rm_optimizer.core.classifier.quantization import is_packed, is_quantized, unpacked
from rm_optimizer.errors import CheckpointError, needs_import
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.locations import ADAPTER_FILE

if TYPE_CHECKING:
    from peft import LoraConfig

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Before every name in peft's weight files."""
_log = logging.getLogger("rm_optimizer")
_BRINGS_EMBEDDINGS = "brings_embeddings"
"""Attribute of a model whose embeddings its adapter replaced."""
_SAMPLE = 16
"""Values of each frozen tensor that identify a base."""


@dataclass(frozen=True)
class BaseModel:
    """The model an adapter belongs to.

    Args:
        source: hub id or absolute folder.
        revision: commit on the hub; None for a folder.
        is_quantized: True if its matrices were in four bits.
        fingerprint: fingerprint of its weights.
    """

    source: str
    revision: str | None
    is_quantized: bool
    fingerprint: str


def base_of(model: PreTrainedModel) -> BaseModel:
    """Source of an adapted model's base.

    Raises:
        CheckpointError: if it cannot: it was built from a configuration or comes from a `.ckpt` file.
    """
    config = lora_config(model)
    if not config.base_model_name_or_path:
        raise CheckpointError(
            "an adapter alone needs a base that can be loaded again, and this one was built from a configuration or "
            "comes from a checkpoint; export the merged model with save_pretrained instead"
        )
    return BaseModel(
        config.base_model_name_or_path,
        config.revision,
        is_quantized(model),
        base_fingerprint(model, adapter_tensor_names(model)),
    )


def base_fingerprint(model: PreTrainedModel, saved: Collection[str]) -> str:
    """16 hexadecimal digits that tell bases apart: the first values of each frozen tensor, rounded to bfloat16.

    Rounded, so that a base loaded in another floating type is the same base. Matrices in four bits are left out.

    Args:
        model: the adapted classifier.
        saved: names of its tensors that belong to the adapter.
    """
    digest = hashlib.sha256()
    packed = {name for name, module in model.named_modules() if is_packed(module)}  # scoring on a CPU rewrites them
    for name, value in sorted(model.state_dict().items()):
        if name not in saved and value.is_floating_point() and not is_under(name, packed):
            sample = value.detach().flatten()[:_SAMPLE].cpu().to(torch.bfloat16).float()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def separate_base(model: PreTrainedModel) -> BaseModel | None:
    """The base that a training checkpoint leaves out, since it can be loaded again; None if the checkpoint holds it.

    Embeddings that an adapter brought are in no base, so that a checkpoint of such a model holds it whole.
    """
    is_whole = not has_adapter(model) or getattr(model, _BRINGS_EMBEDDINGS, False)
    return None if is_whole or not lora_config(model).base_model_name_or_path else base_of(model)


def describe_adapter(model: PreTrainedModel, base: BaseModel | None) -> dict[str, Any] | None:
    """Description of the adapter in a training checkpoint, as JSON values; None without an adapter.

    Args:
        model: the classifier.
        base: the base that the checkpoint leaves out, from `separate_base`.
    """
    if not has_adapter(model):
        return None
    config: dict[str, Any] = lora_config(model).to_dict()
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    described = {"config": values, "is_quantized": is_quantized(model), "base": base and json_values(base)}
    read: dict[str, Any] = json.loads(json.dumps(described))
    return read


def require_base(model: PreTrainedModel, saved: Collection[str], base: Mapping[str, Any], where: str | Path) -> None:
    """Refuse a base whose weights are not those that an adapter was trained with.

    Args:
        model: the adapted classifier.
        saved: names of its tensors that belong to the adapter.
        base: the recorded base.
        where: folder or file of the adapter, for the message.

    Raises:
        CheckpointError: if the weights are others.
    """
    if base_fingerprint(model, saved) != base["fingerprint"]:
        raise CheckpointError(
            f"the adapter in {where} belongs to other weights than {base['source']} holds now; restore that base model"
        )


def adapter_tensor_names(model: PreTrainedModel) -> frozenset[str]:
    """Names in the model of the tensors that belong to the adapter, head-side modules included."""
    return frozenset(_file_names(model))


def stored_name(name: str) -> str:
    """The name in peft's file of a tensor of the adapter.

    Example:
        >>> stored_name("layers.0.q_proj.lora_A.default.weight")
        'base_model.model.layers.0.q_proj.lora_A.weight'
    """
    return _PREFIX + ".".join(part for part in name.split(".") if part != ADAPTER_NAME)


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, which plain peft loads too."""
    config = copy.deepcopy(lora_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    state = model.state_dict()
    tensors = {stored: state[name].detach().cpu().contiguous() for name, stored in _file_names(model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter_config(folder: Path) -> LoraConfig:
    """Read peft's configuration of the adapter in a folder, which names its base.

    Raises:
        CheckpointError: if it is not LoRA's, or names no base.
        ConfigError: if it has a setting with which it could not be merged exactly.
    """
    config = import_peft().PeftConfig.from_pretrained(str(folder))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise CheckpointError(
            f"{folder} holds a PEFT adapter alone, of type {kind} where LORA was expected; "
            "merge it into its base model and give that folder"
        )
    if not config.base_model_name_or_path:
        raise CheckpointError(f"the adapter in {folder} does not name its base model in {ADAPTER_FILE}")
    require_exact(config, folder / ADAPTER_FILE)
    if others := sorted(file.parent.name for file in folder.glob(f"*/{ADAPTER_FILE}")):
        _log.warning("%s also holds the adapters %s, which are not read", folder, ", ".join(others))
    return config


def load_adapter(
    model: PreTrainedModel, folder: Path, config: LoraConfig, recorded: Mapping[str, Any]
) -> frozenset[str]:
    """Put the adapter of a folder and its head into a base classifier, changed in place.

    Args:
        model: the base.
        folder: folder of peft's two files.
        config: peft's configuration.
        recorded: base model by the adapter's `export.json`; empty for adapters that others made.

    Returns:
        Names of the adapter's tensors.

    Raises:
        CheckpointError: if the reward head was not saved, a tensor is missing or unknown, or the base is another one.
    """
    if not is_under(head_name(model), modules_named(model, config.modules_to_save or ())):
        if [*folder.glob("value_head.*")]:
            raise needs_import(folder, "it is an adapter with a value head in a separate file")
        raise CheckpointError(f"the adapter in {folder} was saved without its reward head, which cannot be restored")
    start = _embeddings_name(model)
    for key, rows in _tensors(folder).items():
        if key.startswith(start) and key.endswith("weight"):
            model.resize_token_embeddings(len(rows), mean_resizing=False).weight.data.copy_(rows)
            setattr(model, _BRINGS_EMBEDDINGS, True)
    attach(model, config, seed=0)
    tensors = adapter_tensors(model, folder)
    model.load_state_dict(tensors, strict=False)
    if recorded:
        require_base(model, tensors, recorded, folder)
    return frozenset(tensors)


def adapter_tensors(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Tensors of a stored adapter, head-side modules included, by their names in an adapted classifier.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of another shape.
    """
    names, state, embeddings = _file_names(model), model.state_dict(), _embeddings_name(model)
    wanted = {key: state[name].shape for name, key in names.items()}
    stored = {key: value for key, value in _tensors(folder).items() if key in wanted or not key.startswith(embeddings)}
    wrong = sorted(stored.keys() ^ wanted.keys()) or [
        f"{key} of shape {[*stored[key].shape]} in place of {[*shape]} for a reward"
        for key, shape in wanted.items()
        if stored[key].shape != shape
    ]
    if wrong:
        examples = f"{len(wrong)} tensors, such as {wrong[0]}"
        raise CheckpointError(f"the adapter in {folder} does not fit its base: {examples}")
    return {name: stored[key] for name, key in names.items()}


def _tensors(folder: Path) -> dict[str, Tensor]:
    binary = folder / "adapter_model.bin"
    is_binary = binary.is_file() and not (folder / WEIGHTS_FILE).is_file()
    stored = torch.load(binary, "cpu", weights_only=True) if is_binary else load_file(folder / WEIGHTS_FILE)
    return {f"{key}.weight" if key.endswith("lora_magnitude_vector") else key: value for key, value in stored.items()}


def _embeddings_name(model: PreTrainedModel) -> str:
    """Start of the names in peft's file of the input embeddings, which it stores whole where tokens were added."""
    embeddings = model.get_input_embeddings()
    return next(f"{_PREFIX}{name}." for name, module in model.named_modules() if module is embeddings)


def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """A plain classifier with the adapter's product added to the frozen weights; the adapted one stays as it is.

    Each layer is merged in a copy, so one layer is held in addition to the two models. Matrices in four bits
    come back in the type they compute in, as exact as they are read.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(config)
    plain.load_state_dict(merged_state(model), assign=True)
    return plain.eval()


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of the plain classifier that scores as the adapted one does, by name."""
    layer_type = import_peft().tuners.lora.LoraLayer
    replaced = {
        name: module for name, module in model.named_modules() if isinstance(module, layer_type) or is_packed(module)
    }
    kept = {key: value for key, value in model.state_dict().items() if not is_under(key, replaced)}
    for name, module in replaced.items():
        if is_under(name, replaced.keys() - {name}):
            continue
        layer: Any = module
        if not isinstance(layer, layer_type):
            merged = unpacked(layer)
        elif is_packed(base := layer.get_base_layer()):
            merged, delta = unpacked(base), layer.get_delta_weight(ADAPTER_NAME)
            merged["weight"] = (merged["weight"].float() + delta.float()).to(merged["weight"].dtype)
        else:
            own = copy.deepcopy(layer)
            own.merge(safe_merge=True, adapter_names=[ADAPTER_NAME])
            merged = own.get_base_layer().state_dict()
        kept |= {f"{name}.{key}": value for key, value in merged.items()}
    return kept


def _file_names(model: PreTrainedModel) -> dict[str, str]:
    """Names of the adapter's tensors: the name in the model, and the name in peft's file."""
    whole, biases = saved_modules(model), lora_config(model).bias
    return {
        name: stored_name(name)
        for name in model.state_dict()
        if ADAPTER_NAME in name.split(".")
        or is_under(name, whole)
        or (biases == "all" and name.endswith("bias"))
        or (biases == "lora_only" and name.endswith(".base_layer.bias"))
    }
