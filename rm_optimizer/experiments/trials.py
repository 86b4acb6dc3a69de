"""Trials of a study: a folder for each resolved spec, finished once its result is there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_optimizer.records.files import write_text

RESULT_FILE = "result.json"
"""Appears last, whole: a trial that has it is finished."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Args:
        folder: files that it left.
        result: content of its `result.json`.
    """

    folder: Path
    result: Mapping[str, Any]


def trial_folder(root: Path, spec: Mapping[str, Any]) -> Path:
    """Folder named by the hash of a spec's content; specs of equal content share one.

    Args:
        root: folder of the study's trials.
        spec: resolved options; values without a JSON form are written as text.
    """
    text = json.dumps(spec, default=str, sort_keys=True)
    return root / hashlib.sha256(text.encode()).hexdigest()[:12]


def run_trial(root: Path, spec: Mapping[str, Any], measure: Callable[[Path], Mapping[str, Any]]) -> Trial:
    """Trial of a spec, measured now unless it is finished.

    What an unfinished trial left is removed first, so that a killed study continues with the same command.

    Args:
        root: folder of the study's trials.
        spec: resolved options; see `trial_folder`.
        measure: writes the trial's files into a folder that does not exist yet, and returns the result.
    """
    folder = trial_folder(root, spec)
    file = folder / RESULT_FILE
    if not file.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write_text(file, json.dumps(measure(folder), indent=1) + "\n")
    return Trial(folder, json.loads(file.read_text(encoding="utf-8")))
