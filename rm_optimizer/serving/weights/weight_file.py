"""Safetensors files: writing tensor by tensor, and checks of their headers against a manifest.

Reference: https://huggingface.co/docs/safetensors (eight bytes of header size, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open

from rm_optimizer.errors import WeightsRefused
from rm_optimizer.serving.update_protocol import TensorSpec

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of types in the format, by the names used here."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZE = struct.Struct("<Q")
Buffer: TypeAlias = bytes | memoryview


def num_bytes(spec: TensorSpec) -> int:
    """Number of bytes of a tensor.

    Raises:
        WeightsRefused: if its type is not in `CODES`.
    """
    if spec.dtype not in CODES:
        raise WeightsRefused(f"{spec.name}: expected a type among {', '.join(CODES)}, got {spec.dtype}")
    return math.prod(spec.shape) * _BYTES[CODES[spec.dtype]]


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Tensors as a file holds them: wide types come first, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: (-_BYTES.get(CODES.get(spec.dtype, ""), 0), spec.name))


@dataclass(frozen=True)
class Layout:
    """Positions of the tensors in a file.

    Args:
        head: bytes before the tensors.
        starts: first byte of each tensor in the file, by name.
        size: bytes of the whole file.
    """

    head: bytes
    starts: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Layout of a file with these tensors."""
        entries: dict[str, Any] = {}
        place = 0
        for spec in in_file_order(specs):
            end = place + num_bytes(spec)
            entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [place, end]}
            place = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        text += b" " * (-len(text) % 8)
        first = _SIZE.size + len(text)
        starts = {name: first + entry["data_offsets"][0] for name, entry in entries.items()}
        return cls(_SIZE.pack(len(text)) + text, starts, first + place)


def write_weight_file(path: Path, specs: Sequence[TensorSpec], data: Iterable[tuple[str, Buffer]]) -> None:
    """Write a file of tensors that come in any order, under a temporary name until it is complete."""
    layout, temporary = Layout.of(specs), path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as file:  # only its user may read it
            file.write(layout.head)
            for name, content in data:
                file.seek(layout.starts[name])
                file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def most_header_bytes(specs: Sequence[TensorSpec]) -> int:
    """Most bytes of a header with these tensors by any writer, since others pad and describe differently."""
    return 2**20 + sum(256 + 2 * len(spec.name.encode()) + 24 * len(spec.shape) for spec in specs)


def check_weight_file(path: Path, specs: Sequence[TensorSpec]) -> None:
    """Compare a file's header and size with its manifest; the tensors' bytes are not read.

    Raises:
        WeightsRefused: naming what is missing, extra, of another shape or type, or cut off.
    """
    manifest = {spec.name: spec for spec in specs}
    with opened(path) as stored:
        check_names(set(manifest), set(stored.keys()), "the update's file")
        for name, spec in manifest.items():
            entry = stored.get_slice(name)
            shape, code = list(entry.get_shape()), entry.get_dtype()
            if shape != spec.shape or code != CODES.get(spec.dtype):
                raise WeightsRefused(f"{name}: the manifest says {spec.dtype}{spec.shape}, the file {code}{shape}")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file after a check of its header against its size.

    Raises:
        WeightsRefused: if it is not such a file, is cut off, or a tensor cannot be read within the `with` block.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"the update's file cannot be read as safetensors, or was cut off: {error}") from error


def tensor_files(files: Iterable[str]) -> dict[str, str]:
    """File of each tensor by name; a later file takes precedence."""
    holders: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            holders |= dict.fromkeys(stored.keys(), file)
    return holders


def check_names(expected: set[str], got: set[str], what: str) -> None:
    """Refuse missing and unknown tensors.

    Raises:
        WeightsRefused: naming up to three of them.
    """
    for word, names in (("lacks", expected - got), ("has unknown", got - expected)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
            raise WeightsRefused(f"{what} {word} {len(names)} tensor{'s' * (len(names) > 1)}: {shown}")
