"""Results of a command: the folder of --output and the option --json."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path

from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.checks import require


def made_folder(folder: Path) -> Path:
    """Make the folder of `--output`.

    Args:
        folder: the folder, which may exist already.

    Raises:
        ConfigError: if it cannot be written, or holds a run or a model.
    """
    from rm_optimizer.records.run_folder import require_no_run

    reason = "read-only"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error.strerror)
    is_writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
    require(is_writable, "--output", "be a folder that can be written", f"'{folder}' ({reason})")
    require_no_run(folder, "--output")
    return folder


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Context that removes the folder after a failure if it is still empty, and says how Ctrl-C is continued.

    Raises:
        Interrupted: if the user stops the command.
    """
    try:
        yield
    except (RMOptimizerError, KeyboardInterrupt) as error:
        with suppress(OSError):
            folder.rmdir()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("stopped; the same command goes on from what is done") from None
        raise


@contextmanager
def printed_beside(json_file: Path | None) -> Iterator[None]:
    """Redirect the block's output to standard error if the JSON goes to standard output."""
    is_taken = False
    with suppress(OSError):  # a file that is not there yet is another one
        is_taken = json_file is not None and os.path.samestat(json_file.stat(), os.fstat(1))
    with redirect_stdout(sys.stderr) if is_taken else nullcontext():
        yield


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
