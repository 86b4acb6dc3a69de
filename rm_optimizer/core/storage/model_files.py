"""Checks of a reward model's files before anything is loaded. This module does not import torch."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rm_optimizer.core.rows.hub import hub_obstacle, restored_hub
from rm_optimizer.core.storage.export_record import read_record
from rm_optimizer.core.storage.torn_files import damage
from rm_optimizer.errors import CheckpointError, no_trained_head
from rm_optimizer.records.locations import Source, SourceKind, resolve_source


def find_source(source: str | Path, revision: str | None = None) -> Source:
    """Find the source that the user named: a folder, a file or a hub id, for which the hub is asked.

    Raises:
        CheckpointError: if there is no such path, or the hub has no such model.
    """
    found = resolve_source(source)
    if found.kind is SourceKind.HUB and (obstacle := hub_obstacle(found.location, "model", revision)):
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {obstacle}")
    return found


def refuse_by_files(source: str) -> None:
    """Refuse within a second what loading would refuse later, if the files show the reason.

    Raises:
        CheckpointError: if there is no model, a file is torn, or no weight can be that of a reward head.
    """
    with restored_hub():
        found = find_source(source)
    if found.kind is SourceKind.CHECKPOINT:
        require_archive(Path(found.location))
    elif found.kind is SourceKind.FOLDER:
        _refuse_folder(source, Path(found.location))


def require_archive(path: Path) -> None:
    """Refuse a `.ckpt` file that is not a zip archive.

    Raises:
        CheckpointError: if it is not one.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is torn, or is none (such files are zip archives, and this one "
            "has no table of contents); give another file"
        )


def _refuse_folder(source: str, folder: Path) -> None:
    read_record(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        may_hold_head = any(folder.glob("*.bin")) or "quantization_config" in config or any(_rows_of_one(folder))
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {damage(folder) or error}") from error
    if may_hold_head:
        return
    if (reason := damage(folder)) is not None:
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {reason}")
    saved_as = ", ".join(map(str, config.get("architectures") or ())) or "a model"
    raise no_trained_head(source, f"it was saved as {saved_as}, and none of its weights is a layer with one output")


def _rows_of_one(folder: Path) -> Iterator[bool]:
    """Flag of each stored tensor, True for the weight shape of a linear layer with one output."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for name in stored.keys():  # noqa: SIM118, no dictionary
                shape = stored.get_slice(name).get_shape()
                yield len(shape) == 2 and shape[0] == 1
