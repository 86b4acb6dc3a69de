"""Sources of models: hub ids, model folders, run folders, adapters alone and Lightning checkpoints."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rm_optimizer.errors import CheckpointError

EXPORT_FILE = "export.json"
"""File that `save_pretrained` writes next to the weights: a description of the model and a check of its reload."""
CODE_FILE = "modeling_reward.py"
"""Code of a head that no class of `transformers` has, next to the weights of such a model."""
ADAPTER_FILE = "adapter_config.json"
"""Configuration of a LoRA adapter, as peft names it."""
ENSEMBLE_FILE = "ensemble.json"
"""Record of an ensemble of reward models in its folder."""
BEST_FOLDER = "best"
"""Folder of the exported best model inside a run folder."""
_WEIGHTS = re.compile(r"(pytorch_)?model[-.].*(safetensors|bin)(\.index\.json)?")
"""Names of a whole model's weights."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SourceKind(Enum):
    """Kind of a model's storage."""

    HUB = "hub id"
    FOLDER = "folder"
    ADAPTER = "folder of an adapter alone"
    CHECKPOINT = "Lightning checkpoint"


@dataclass(frozen=True)
class Source:
    """Location of a model.

    Args:
        kind: kind of storage.
        location: hub id or path, as `transformers` and torch read it.
    """

    kind: SourceKind
    location: str


def resolve_source(source: str | Path) -> Source:
    """Determine the kind of the user's name for a model; a missing path is never looked up on the hub.

    Args:
        source: hub id (`Qwen/Qwen2.5-0.5B`), model folder, run folder (which means its `best/`), folder of an adapter
            whose base is elsewhere, or `.ckpt` file.

    Raises:
        CheckpointError: if a path does not exist or holds no model.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        is_adapter, is_whole = (path / ADAPTER_FILE).is_file(), any(map(_WEIGHTS.fullmatch, os.listdir(path)))
        if is_adapter and is_whole:
            raise CheckpointError(f"{path} holds an adapter and the weights of a whole model; keep one of them there")
        if is_adapter:
            return Source(SourceKind.ADAPTER, str(path))
        for folder in (path, path / BEST_FOLDER):
            if (folder / "config.json").is_file():
                return Source(SourceKind.FOLDER, str(folder))
        if named := sorted(str(file.parent) for file in path.glob(f"*/{ADAPTER_FILE}")):
            raise CheckpointError(f"{path} holds adapters, each in its folder; give one: {', '.join(named)}")
        raise CheckpointError(
            f"no model in the folder {path}: expected config.json, or {BEST_FOLDER}/config.json in a run folder; "
            "weights alone are read by rm-opt import with --base"
        )
    if path.is_file():
        if path.suffix != ".ckpt":
            raise CheckpointError(f"expected a model folder, a .ckpt file or a hub id, got the file {path}")
        return Source(SourceKind.CHECKPOINT, str(path))
    if _means_a_path(source):
        raise CheckpointError(
            f"no model at {source}: the path does not exist; check it, or give a hub id such as org/name"
        )
    return Source(SourceKind.HUB, str(source))


def _means_a_path(source: str | Path) -> bool:
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.endswith(".ckpt"):
        return True
    owner, _, name = source.partition("/")
    return source.startswith(".") or (bool(name) and Path(owner).is_dir())
