"""Folder of an analysis. Results of another model or of other options are never overwritten. Imports no torch."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.records.run_options import flat, options_of
from rm_optimizer.schema.landscape import AnalyzeConfig

ANALYSIS_FILE = "analysis.json"
"""File beside the results with their options, versions and machine."""
_FREE = ("output_dir", "progress", "landscape.token_budget", "landscape.processes", "logger.")
"""Names, or beginnings of names, of the options that change no result."""


def results_folder(options: AnalyzeConfig) -> Path:
    """The folder that an analysis writes to: `output_dir`, with a number added if it holds another analysis of the run.

    Raises:
        ConfigError: if the folder holds another analysis and is not the default folder of a run's checkpoint.
    """
    folder, identity = Path(options.output_dir), _identity(options_of(options))
    if _is_for(folder, identity):
        return folder
    run = RunFolder.of(options.checkpoint)
    if run is None or folder != run.landscape(options.checkpoint, options.landscape.type):
        raise ConfigError(
            f"{folder} holds the results of another analysis ({_told(folder)}); choose another output_dir"
        )
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(other for other in numbered if _is_for(other, identity))


def _is_for(folder: Path, identity: dict[str, Any]) -> bool:
    """True if a folder holds no analysis, or the one with this identity."""
    recorded = _recorded(folder)
    return not recorded or _identity(recorded) == identity


def _identity(options: dict[str, Any]) -> dict[str, Any]:
    """The options that decide a result, with an existing checkpoint as an absolute path."""
    path = os.path.expanduser(options["checkpoint"])
    decisive = dict(flat(options)) | {"checkpoint": os.path.realpath(path) if os.path.exists(path) else path}
    return {name: value for name, value in decisive.items() if not name.startswith(_FREE)}


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / ANALYSIS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    options = content.get("options") if isinstance(content, dict) else None
    return options if isinstance(options, dict) and "checkpoint" in options else {}


def _told(folder: Path) -> str:
    options = _recorded(folder)
    landscape = options.get("landscape", {})
    return f"checkpoint={options['checkpoint']}, landscape={landscape.get('type')}, params={landscape.get('params')}"
