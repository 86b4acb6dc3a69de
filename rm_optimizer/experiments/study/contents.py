"""Digests of the pairs that a trial reads, so that its name depends on their content and not on their path."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def content_of(source: Any) -> Any:
    """Sources of `data.train` or `data.val` with paths replaced by the digests of their files; hub names remain.

    Args:
        source: a path, pattern or hub name, a mapping with a `path`, a list of those, or None.
    """
    if isinstance(source, str):
        files = _files(os.path.expanduser(source))
        return [_digest(*each) for each in files] if files else source
    if isinstance(source, Mapping):
        return {name: content_of(value) if name == "path" else value for name, value in source.items()}
    return [content_of(item) for item in source] if isinstance(source, list | tuple) else source


def _files(location: str) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file of a location, in order; a folder's hidden files are left out."""
    path = Path(location)
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if not each.name.startswith((".", "_")))
    else:
        found = [path] if path.exists() else [Path(each) for each in sorted(glob.glob(location))]
    stats = [(each, each.stat()) for each in found if each.is_file()]
    return [(str(each), stat.st_size, stat.st_mtime_ns) for each, stat in stats]


@cache
def _digest(path: str, size: int, changed: int) -> str:
    """SHA-256 of a file; a process reads an unchanged file only once."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
