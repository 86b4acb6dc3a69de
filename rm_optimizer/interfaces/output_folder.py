"""Folder for the results of a command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError


def made_folder(folder: Path) -> Path:
    """Make the folder of `--output`.

    Args:
        folder: the folder, which may exist already.

    Raises:
        ConfigError: if it cannot be written, or holds a run or a model.
    """
    from rm_optimizer.records.run_folder import require_no_run

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be written, got '{folder}' ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output must be a folder that can be written, got '{folder}' (read-only)")
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
            raise Interrupted("stopped; the same command goes on from the responses scored so far") from None
        raise
