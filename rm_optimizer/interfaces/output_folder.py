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
    from rm_optimizer.records.run_folder import OPTIONS_FILE, RESULT_FILE

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be written, got '{folder}' ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output must be a folder that can be written, got '{folder}' (read-only)")
    if found := [name for name in (OPTIONS_FILE, RESULT_FILE, "config.json") if (folder / name).exists()]:
        raise ConfigError(
            f"--output must not be the folder of a run or a model, got '{folder}' (it holds {found[0]}); name another"
        )
    return folder
