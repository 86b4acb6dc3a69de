"""Files of a stored model: checks before anything is loaded, `export.json` with its digests, training pairs.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rm_optimizer.core.pairs.pair import PreferencePair, pair_fingerprints
from rm_optimizer.errors import CheckpointError, nearest, no_trained_head
from rm_optimizer.records.files import replacing
from rm_optimizer.records.hub import hub_obstacle, restored_hub
from rm_optimizer.records.locations import BEST_FOLDER, EXPORT_FILE, Source, SourceKind, resolve_source
from rm_optimizer.schema.composition import config_root

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json"),
)
"""Any of these makes a tokenizer."""
_WEIGHTS = ("*.safetensors", "*.bin")
_ADVICE = "copy the folder again, or export the model again"


def damage(folder: Path) -> str | None:
    """The first file of a model folder that is damaged, empty or missing, and what to do; None if all look whole."""
    found = next(_faults(folder), None)
    return None if found is None else f"{found}; {_ADVICE}"


def _faults(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            state = "empty" if not file.stat().st_size else "damaged: it is no whole JSON"
            yield f"{file.name} is {state}"
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            continue  # among the JSON files
        lost = sorted(name for name in shards if not (folder / name).is_file())
        yield from (f"{name} is missing, which {index.name} names" for name in lost)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            yield f"{file.name} is empty" if not size else f"{file.name} is truncated: only {size:,} bytes are there"
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        yield "it holds no weights: expected model.safetensors (rm-opt import reads others, such as .pt)"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "it holds no tokenizer: expected tokenizer.json, or another of the files its base model has"


DIGESTS = "weights"
"""The entry of `export.json` that holds the digests of the weight files."""
_CHUNK_BYTES = 1 << 26


def read_record(folder: Path) -> dict[str, Any]:
    """The `export.json` of a folder; empty where other people's models have none.

    Raises:
        CheckpointError: if the file is damaged.
    """
    path = folder / EXPORT_FILE
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["identity"], dict):
            raise TypeError("identity must be an object")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged or was not written by RM-Optimizer; export the model again"
        ) from error
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
        record: its `export.json`; nothing is checked where it holds no digests.

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


def find_source(source: str | Path, revision: str | None = None) -> Source:
    """Find the source that the user named: a folder, a file or a hub id, for which the hub is asked.

    Raises:
        CheckpointError: if there is no such path, or the hub has no such model.
    """
    found = resolve_source(source)
    if found.kind is SourceKind.HUB and (obstacle := hub_obstacle(found.location, "model", revision)):
        presets = [file.stem for file in (Path(config_root()) / "model").glob("*.yaml")]
        for near in nearest(found.location, presets, 0.7):
            obstacle += f"; did you mean {near}, a preset of train_reward_model and of rm-opt train?"
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {obstacle}")
    return found


def refuse_by_files(source: str) -> None:
    """Refuse within a second what loading would refuse later, if the files show the reason.

    Raises:
        CheckpointError: if there is no model, a file is damaged, or no weight fits a reward head.
    """
    with restored_hub():
        found = find_source(source)
    if found.kind is SourceKind.CHECKPOINT:
        require_archive(Path(found.location))
    if found.kind is not SourceKind.FOLDER:
        return
    folder = Path(found.location)
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


def require_archive(path: Path) -> None:
    """Refuse a `.ckpt` file that is not a zip archive.

    Raises:
        CheckpointError: if it is not one.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is damaged, or none (such files are zip archives, and this one "
            "has no table of contents); give another file"
        )


def _rows_of_one(folder: Path) -> Iterator[bool]:
    """Flag of each stored tensor, True for the weight shape of a linear layer with one output."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for name in stored.keys():  # noqa: SIM118, no dictionary
                shape = stored.get_slice(name).get_shape()
                yield len(shape) == 2 and shape[0] == 1


TRAINED_PAIRS_FILE = "trained_pairs.npz"
"""In a run folder and in its exported model: the fingerprints of the training pairs."""


@dataclass(frozen=True)
class TrainedOn:
    """Overlap of an evaluation's data with a model's training data.

    Args:
        num_pairs: pairs evaluated that training read, in either order.
        num_pairs_of_prompts: pairs evaluated whose prompt training read, those that it read whole included.
        num_prompts: different prompts of these.
    """

    num_pairs: int
    num_pairs_of_prompts: int
    num_prompts: int


@dataclass(frozen=True, eq=False)
class TrainedPairs:
    """Fingerprints of a model's training pairs.

    Args:
        pairs: fingerprints of the pairs, sorted, each once.
        prompts: fingerprints of their prompts, sorted, each once.
    """

    pairs: NDArray[np.uint64]
    prompts: NDArray[np.uint64]

    @classmethod
    def of(cls, *parts: NDArray[np.uint64]) -> TrainedPairs:
        """Fingerprints from the arrays of `pair_fingerprints`."""
        both = np.concatenate([np.zeros((0, 2), dtype=np.uint64), *parts])
        return cls(np.unique(both[:, 0]), np.unique(both[:, 1]))

    def merged(self, other: TrainedPairs) -> TrainedPairs:
        """Union of both."""
        return TrainedPairs(np.union1d(self.pairs, other.pairs), np.union1d(self.prompts, other.prompts))

    def count(self, pairs: Sequence[PreferencePair]) -> TrainedOn:
        """Numbers of these pairs and of their prompts among the training data."""
        marks = pair_fingerprints(pairs)
        seen_prompt = np.isin(marks[:, 1], self.prompts)
        return TrainedOn(
            num_pairs=int(np.isin(marks[:, 0], self.pairs).sum()),
            num_pairs_of_prompts=int(seen_prompt.sum()),
            num_prompts=len(np.unique(marks[seen_prompt, 1])),
        )

    def write(self, path: Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, pairs=self.pairs, prompts=self.prompts)
        return path

    @classmethod
    def read(cls, path: Path) -> TrainedPairs:
        """Read the file of `write`.

        Raises:
            CheckpointError: if the file is damaged.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["pairs"], arrays["prompts"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            told = "so it is unknown what the model was trained on; remove it to evaluate without"
            raise CheckpointError(f"{path} is damaged, {told}") from error

    @classmethod
    def recorded(cls, source: str | Path) -> TrainedPairs | None:
        """Recorded training pairs of a model, in its folder or its run's; None without a record.

        Args:
            source: anything `BradleyTerryRM.from_pretrained` loads.

        Raises:
            CheckpointError: if the record is damaged.
        """
        given = Path(source).expanduser()
        if not given.exists():
            return None  # a hub id
        starts = (given.absolute(), given.resolve())
        places = [folder for path in starts for folder in (path, path / BEST_FOLDER, *path.parents[:2])]
        files = (folder / TRAINED_PAIRS_FILE for folder in places)
        return next((cls.read(file) for file in files if file.is_file()), None)
