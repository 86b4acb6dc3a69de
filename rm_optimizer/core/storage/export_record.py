"""`export.json` beside stored weights: reading it, and refusing weights that are not those it was written for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.locations import EXPORT_FILE

DIGESTS = "weights"
"""The entry of `export.json` that holds the digests of the weight files."""
_CHUNK_BYTES = 1 << 26


def read_record(folder: Path) -> dict[str, Any]:
    """The `export.json` of a folder; empty where other people's models have none.

    Raises:
        CheckpointError: if the file is torn.
    """
    path = folder / EXPORT_FILE
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["identity"], dict):
            raise TypeError("identity must be an object")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is torn or was not written by RM-Optimizer; export the model again") from error
    found: dict[str, Any] = record
    return found


def weight_digests(folder: Path) -> dict[str, str]:
    """Digest of every weight file of a folder by name: SHA-256 of the SHA-256s of its chunks of 64 MiB.

    Chunks are hashed by all cores together, since a file may hold tens of gigabytes.
    """
    return {file.name: _digest(file) for file in sorted(folder.glob("*.safetensors"))}


def _digest(file: Path) -> str:
    starts = range(0, file.stat().st_size, _CHUNK_BYTES)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hashes = pool.map(lambda start: hashlib.sha256(os.pread(descriptor, _CHUNK_BYTES, start)).digest(), starts)
            return hashlib.sha256(b"".join(hashes)).hexdigest()
    finally:
        os.close(descriptor)


def require_exported_weights(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse weight files that were changed, added or removed since `export.json` was written.

    Args:
        folder: holds the weights.
        record: its `export.json`; nothing is checked where it holds no digests, as those of other people do.

    Raises:
        CheckpointError: naming the files.
    """
    recorded = record.get(DIGESTS)
    if recorded is None:
        return
    found = weight_digests(folder)
    changed = sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name))
    if changed:
        raise CheckpointError(
            f"the weights in {folder} are not those that were exported: {', '.join(changed[:3])} changed since its "
            f"certificate was written; restore the folder, or, if the change is meant, delete its {EXPORT_FILE} and "
            "export the model again"
        )
