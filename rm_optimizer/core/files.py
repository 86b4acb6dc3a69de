"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside a file, to write under: the block's end renames it, a failure removes it.

    Missing folders are made. An earlier file of that name stands until the new one is whole.

    Args:
        path: the file.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all.

    Raises:
        OSError: if the file cannot be written; an earlier one of that name is then as it was.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
