"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Write a text file under a temporary name, then rename it; missing folders are made.

    Raises:
        OSError: if the file cannot be written; an earlier one of that name is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
