"""Stored tensors of a model in whatever files they lie, with its configuration."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from rm_optimizer.core.classifier.adapters import import_peft
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.storage.loading import HARMLESS
from rm_optimizer.core.storage.model_files import find_source
from rm_optimizer.errors import CheckpointError, MissingExtra
from rm_optimizer.records.locations import ADAPTER_FILE

_OTHER_FILES = ("optim", "scheduler", "lr_scheduler", "rng_state", "training_args", "random_states")
"""Starts of the names of a trainer's other files in torch's format, and of other parts of its checkpoints."""
_CONSTANTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Ends of the names of what bitsandbytes stores with a weight in four bits."""
_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when it is asked for."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class StoredModel:
    """Tensors of a model, read one at a time, and its configuration.

    Args:
        folder: folder of the tensors.
        base: folder of the tokenizer.
        config: content of `config.json`.
        tensors: the tensors by their stored names.
    """

    folder: Path
    base: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


@contextmanager
def stored_model(source: str, base: str | None, revision: str | None) -> Iterator[StoredModel]:
    """The stored model of a folder or hub id, whose tensors can be read in the block.

    Weights may be safetensors, torch's files, a checkpoint of `torch.distributed.checkpoint`, or an adapter with a head
    in a separate file, which is merged into its base.

    Args:
        source: folder or hub id.
        base: folder or hub id of configuration and tokenizer; None takes the source.
        revision: hub revision of the source.

    Raises:
        CheckpointError: if there is no such source, or its files cannot be read.
    """
    folder = _local(source, revision)
    home = folder if base is None else _local(base, None)
    with TemporaryDirectory() as work:
        try:
            tensors = dict(_from_files(folder, Path(work)))
            if (folder / ADAPTER_FILE).is_file():
                home, merged = _merged(folder, base, tensors)
                tensors = {name: each for name, each in tensors.items() if not _is_of_adapter(name)}
                tensors |= {name: _in_memory(value) for name, value in merged.state_dict().items()}
                config = merged.config.to_dict()
                home = folder if (folder / "tokenizer_config.json").is_file() else home  # plain peft saves none
            else:
                config, _ = PretrainedConfig.get_config_dict(home)
        except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{source} cannot be read: {(str(error).splitlines() or ['?'])[0]}") from error
        if not tensors:
            raise CheckpointError(f"{source} holds no weights: expected .safetensors, .bin or .pt files")
        if "model_type" not in config:
            raise CheckpointError(f"{source} has no {CONFIG_NAME} with a model_type; name its base with --base")
        described = config.pop("quantization_config", None)
        yield StoredModel(folder, home, config, _unpacked(source, described, tensors))


def _local(source: str, revision: str | None) -> Path:
    if (path := Path(source).expanduser()).is_dir():
        return path
    return Path(snapshot_download(find_source(source, revision).location, revision=revision))


def _from_files(folder: Path, work: Path) -> Iterator[tuple[str, StoredTensor]]:
    if (folder / ".metadata").is_file():
        dcp_to_torch_save(folder, work / "whole.pt")
        yield from _in_torch_file(work / "whole.pt")
        return
    files = sorted(folder.glob("*.safetensors"))
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if lost := sorted(name for name in listed if not (folder / name).is_file()):
            raise CheckpointError(f"{folder} lacks {lost[0]}, which {index.name} names")
        files = [file for file in files if file.name in listed or not file.name.startswith("model-")]
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118, no dictionary
                shape = tuple(stored.get_slice(name).get_shape())
                yield name, StoredTensor(shape, partial(_read, file, name))
    has_whole = any(file.name.startswith("model") for file in files)
    for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
        if not file.name.startswith(_OTHER_FILES) and not (has_whole and file.name.startswith("pytorch_model")):
            yield from _in_torch_file(file)


def has_other_weights(folder: Path) -> bool:
    """True if an adapter's folder holds further weights, such as a value head."""
    known = ("adapter_model", *_OTHER_FILES)
    return any(not file.name.startswith(known) for kind in ("*.bin", "*.safetensors") for file in folder.glob(kind))


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as stored:
        tensor: Tensor = stored.get_tensor(name)
    return tensor


def _in_memory(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), lambda: tensor)


def _in_torch_file(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    while inner := {  # {"module": weights}, {"model": weights, "optimizer": …}, …
        name: each
        for name, each in (stored.items() if isinstance(stored, Mapping) else ())
        if isinstance(each, Mapping) and not str(name).startswith(_OTHER_FILES)
    }:
        if len(inner) > 1:
            raise CheckpointError(
                f"{file.name} holds {', '.join(map(str, inner))}; keep the one with the weights there"
            )
        (stored,) = inner.values()
    for name, tensor in stored.items() if isinstance(stored, Mapping) else ():
        if torch.is_tensor(tensor):
            yield name, _in_memory(tensor)


def _unpacked(
    source: str, described: Mapping[str, Any] | None, tensors: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """The tensors in floating types: of bitsandbytes in four or eight bits, or in FP8 with a scale for each block.

    Raises:
        CheckpointError: if they are quantized in another way.
    """
    method = (described or {}).get("quant_method", "bitsandbytes")
    kinds = {"bitsandbytes": r"(.+)\.(quant_state\..+|SCB)", "fp8": r"(.+)_(scale_inv)"}
    if method not in kinds:
        raise CheckpointError(f"{source} stores weights quantized by {method}; write it in bfloat16 by its own library")
    keys = [key for key in map(re.compile(kinds[method]).fullmatch, tensors) if key] if described else []
    if keys and method == "bitsandbytes" and find_spec(method) is None:
        raise MissingExtra(method, "qlora")
    kept, used = dict(tensors), set[str]()
    for key in keys:
        name = f"{key[1]}.weight" if key[2] == "SCB" else key[1]
        parts = {
            each: tensors[each] for each in (key[0], *(f"{name}.{kind}" for kind in _CONSTANTS)) if each in tensors
        }
        used |= {*parts, f"{key[1]}.weight_format"}
        shape = tensors[name].shape
        if key[2].startswith("quant_state"):
            shape = tuple(json.loads(bytes(tensors[key[0]].read().tolist()))["shape"])
        block = None if method != "fp8" else (described or {}).get("weight_block_size")
        kept[name] = StoredTensor(shape, partial(_unpack, name, tensors[name], parts, block))
    return {name: each for name, each in kept.items() if name not in used}


def _unpack(name: str, packed: StoredTensor, parts: Mapping[str, StoredTensor], block: Sequence[int] | None) -> Tensor:
    """A weight from its packed values and their factors; in FP8 each block has one, or the whole weight."""
    weight, stored = packed.read(), {each.removeprefix(f"{name}."): part.read() for each, part in parts.items()}
    if len(stored) > 1:  # bitsandbytes in four bits
        functional = import_module("bitsandbytes.functional")
        state = functional.QuantState.from_dict(stored, device=torch.device("cpu"))
        return functional.dequantize_4bit(weight, state).float()  # type: ignore[no-any-return]
    ((kind, factor),) = stored.items()
    factor = factor.float()
    if kind.endswith("SCB"):
        return weight.float() * factor[:, None] / 127
    if block is None and factor.numel() == 1:
        return weight.float() * factor
    if block is None or factor.shape != tuple(-(-size // each) for size, each in zip(weight.shape, block, strict=True)):
        raise CheckpointError(f"{kind} of shape {[*factor.shape]} does not fit weight_block_size {block}")
    return weight.float() * torch.kron(factor, torch.ones(*block))[: weight.shape[0], : weight.shape[1]]


def _is_of_adapter(name: str) -> bool:
    return "lora_" in name or name.startswith("base_model.")


def _merged(folder: Path, base: str | None, tensors: Mapping[str, StoredTensor]) -> tuple[Path, PreTrainedModel]:
    """Folder of an adapter's base, and the base with the adapter merged in float32, new tokens included."""
    peft = import_peft()
    config = peft.PeftConfig.from_pretrained(str(folder))
    home = _local(base or config.base_model_name_or_path, config.revision if base is None else None)
    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    if getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError(f"the base {home} is quantized, so that merging rounds; name another by --base")
    table = next(name for name, each in model.named_modules() if each is model.get_input_embeddings())
    for name, each in tensors.items():
        if name.startswith(f"base_model.model.{table}.") and name.endswith("weight"):
            model.resize_token_embeddings(each.shape[0], mean_resizing=False)
    return home, peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)


def write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors as safetensors with an index, a few gigabytes a file, so that few are in memory at a time."""
    shard, places, size = dict[str, Tensor](), dict[str, str](), 0

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool and not HARMLESS.search(name):
            kind = dtype_name(tensor.dtype)
            raise CheckpointError(f"{name} is stored in {kind}, and config.json does not tell how it was quantized")
        shard[name] = tensor.contiguous().clone()
        size += tensor.nbytes
        if size > _SHARD_BYTES:
            write()
            size = 0
    if shard:
        write()
    index = {"metadata": {}, "weight_map": places}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
