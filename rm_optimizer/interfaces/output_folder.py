"""Folder for the results of a command."""

from __future__ import annotations

import os
from pathlib import Path

from rm_optimizer.errors import ConfigError


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
