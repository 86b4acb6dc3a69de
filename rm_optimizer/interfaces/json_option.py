"""Option `--json` of commands that print a table: the result as JSON, in a file or on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.files import write_text


@contextmanager
def printed_beside(json_file: Path | None) -> Iterator[None]:
    """Redirect the block's output to standard error if the JSON goes to standard output."""
    if json_file is None or not _is_standard_output(json_file):
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _is_standard_output(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def write_json(path: Path | None, text: str) -> None:
    """Write JSON text if the option names a file.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if path is None:
        return
    try:
        write_text(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"--json must be a file that can be written, got '{path}' ({error.strerror})") from error
