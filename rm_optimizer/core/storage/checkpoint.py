"""A reward model inside a training checkpoint: everything but the weights, as values that load without code."""

from __future__ import annotations

import base64
import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.storage.adapter_files import adapter_tensor_names, describe_adapter
from rm_optimizer.core.storage.model_files import require_archive
from rm_optimizer.errors import CheckpointError

PAYLOAD_KEY = "rm_optimizer"
"""The entry of a `.ckpt` file that makes it loadable as a reward model."""
WEIGHTS_PREFIX = "model.model."
"""Before the classifier's parameter names: the training module's `model` is a `BradleyTerryRM`, whose `model` it is."""


def describe_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Configuration, class, tokenizer, adapter and identity as JSON values, safe under `torch.load(weights_only=True)`.

    Args:
        model: the classifier.
        tokenizer: its tokenizer; files are stored in base64, since some are binary.
        identity: rendering, padding and head as in `export.json`.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in sorted(Path(folder).iterdir())}
    return {
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "architecture": {"class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch.")},
        "tokenizer_files": files,
        "adapter": describe_adapter(model),
        "export": json.loads(json.dumps(dict(identity))),
    }


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The payload of a `.ckpt` file and the classifier's weights by name, memory-mapped on the CPU.

    Raises:
        CheckpointError: if the file is torn, needs code to load, or was not written by RM-Optimizer.
    """
    require_archive(Path(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_fault(error)}") from error
    if not isinstance(content, dict) or PAYLOAD_KEY not in content or "state_dict" not in content:
        raise CheckpointError(f"{path} was not written by RM-Optimizer: it has no '{PAYLOAD_KEY}' entry")
    weights = {
        name.removeprefix(WEIGHTS_PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(WEIGHTS_PREFIX)
    }
    return content[PAYLOAD_KEY], weights


def _fault(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return "it holds objects that only code could load, so RM-Optimizer did not write it"
    if isinstance(error, PermissionError | FileNotFoundError):
        return str(error.strerror)
    return "it is torn; copy it again, or take another checkpoint of the run"


def write_description(payload: Mapping[str, Any], folder: Path) -> None:
    """Write a payload's configuration and tokenizer as the files that `transformers` reads."""
    (folder / "config.json").write_text(json.dumps(payload["config"]), encoding="utf-8")
    for name, content in payload["tokenizer_files"].items():
        (folder / Path(name).name).write_bytes(base64.b64decode(content))


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load a checkpoint's weights into a classifier, every one of them; a base in four bits stays as it was read.

    Args:
        model: model of the architecture in `read_checkpoint`'s payload.
        weights: weights from `read_checkpoint`.
        path: the file, for the message.

    Raises:
        CheckpointError: if names are missing or unknown.
    """
    if is_quantized(model):
        names = adapter_tensor_names(model)
        weights = {name: value for name, value in weights.items() if name in names}
        missing, unknown = sorted(names - weights.keys()), list[str]()
        model.load_state_dict(weights, strict=False)
    else:
        missing, unknown = model.load_state_dict(weights, strict=False)
    if missing or unknown:
        examples = ", ".join([*missing, *unknown][:3])
        raise CheckpointError(
            f"{path} is torn: {len(missing)} weights are missing and {len(unknown)} unknown, among them {examples}"
        )
