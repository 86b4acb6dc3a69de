"""Defects of a model folder's files, in words, after a library has failed to load them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json"),
)
"""Any of these makes a tokenizer."""
_WEIGHTS = ("*.safetensors", "*.bin")
_ADVICE = "copy the folder again, or export the model again"


def damage(folder: Path) -> str | None:
    """The first file of a model folder that is torn, empty or missing, and what to do; None if all look whole."""
    found = next(chain(_torn_json(folder), _torn_weights(folder), _missing(folder)), None)
    return None if found is None else f"{found}; {_ADVICE}"


def _torn_json(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            state = "empty" if not file.stat().st_size else "torn: it is no whole JSON"
            yield f"{file.name} is {state}"


def _torn_weights(folder: Path) -> Iterator[str]:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            continue  # told by `_torn_json`
        lost = sorted(name for name in shards if not (folder / name).is_file())
        yield from (f"{name} is missing, which {index.name} names" for name in lost)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            yield f"{file.name} is empty" if not size else f"{file.name} is torn: its {size:,} bytes are not all of it"


def _missing(folder: Path) -> Iterator[str]:
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        yield "it holds no weights: expected model.safetensors"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "it holds no tokenizer: expected tokenizer.json, or another of the files its base model has"
