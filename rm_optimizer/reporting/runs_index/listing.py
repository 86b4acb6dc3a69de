"""List of runs and studies below a folder; stored results are read without their checks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.study import FROZEN_FILE, PLAN_FILE, TRIALS, StudyPlan, compares_optimizers
from rm_optimizer.experiments.trial import RESULT_FILE as TRIAL_RESULT
from rm_optimizer.records.run_folder import DIVERGED_FILE, METRICS_FILE, OPTIONS_FILE, RESULT_FILE, RunFolder

DEEPEST = 6
"""Number of levels below the folder that are searched."""
_TELLING = (PLAN_FILE, FROZEN_FILE, RESULT_FILE, OPTIONS_FILE)
"""Files that identify a folder as a study or a run."""
_OF_A_RUN = frozenset(
    ("best", "checkpoints", "evaluations", "plots", "landscape", "tensorboard", "report", "readiness", "wandb")
)
"""Folders of a run that contain no other run."""
_SCORES = ("accuracy", "over_length", "nll", "ece")


@dataclass(frozen=True)
class Score:
    """A number of a result with its 95 % interval; NaN if it is not known."""

    value: float = math.nan
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListedFolder:
    """A run or a study in a list.

    Args:
        name: its path below the folder of the list, with slashes.
        is_run: False for a study.
        state: its end, or how far it is; of a study its kind too.
        changed: time of its last result, in seconds since 1970.
        model: model preset of a run.
        optimizer: optimizer of a run.
        seed: seed of a run.
        accuracy: validation accuracy.
        over_length: accuracy − length baseline ("the longer response wins").
        nll: validation NLL.
        ece: expected calibration error.
        minutes: duration of training.
    """

    name: str
    is_run: bool
    state: str
    changed: float
    model: str = ""
    optimizer: str = ""
    seed: int | None = None
    accuracy: Score = Score()
    over_length: Score = Score()
    nll: Score = Score()
    ece: Score = Score()
    minutes: float = math.nan


@dataclass
class Listing:
    """Runs and studies below a folder; those without changes since the last look are not read again.

    Args:
        root: the folder.
        entries: the runs and studies of the last look by name.
        num_passed: links, and folders deeper than `DEEPEST`, that the last look passed over.
    """

    root: Path
    entries: dict[str, ListedFolder] = field(default_factory=dict)
    num_passed: int = 0
    _read: dict[str, tuple[object, ListedFolder]] = field(default_factory=dict)

    def look(self) -> list[ListedFolder]:
        """The current runs and studies, newest first.

        Links are not followed. A run inside a run (a member of an ensemble) is listed too; runs of a study are not.
        """
        self.num_passed, found = 0, {}
        for name, told_by, version in self._found(self.root, "", 0):
            try:
                found[name] = self._entry(name, told_by, version)
            except OSError:  # removed meanwhile
                self.num_passed += 1
        self.entries = dict(sorted(found.items(), key=lambda item: (-item[1].changed, item[0])))
        return list(self.entries.values())

    def _found(self, folder: Path, name: str, depth: int) -> Iterator[tuple[str, str, object]]:
        """Name, file that tells the kind, and version of each run and study in a folder."""
        try:
            with os.scandir(folder) as scan:
                inside = {entry.name: entry for entry in scan}
            told_by = next((file for file in _TELLING if file in inside), None)
            watched = [
                inside[file].stat()
                for file in (told_by, METRICS_FILE, DIVERGED_FILE)
                if file is not None and file in inside
            ]
        except OSError:  # removed meanwhile, or not readable for this user
            self.num_passed += 1
            return
        if told_by in (PLAN_FILE, FROZEN_FILE):
            yield name, told_by, object()  # its results are deeper, where a change is not visible here
            return
        if told_by is not None:
            yield name, told_by, [(stat.st_mtime_ns, stat.st_size) for stat in watched]
        yield from self._below(folder, name, depth, inside, () if told_by is None else _OF_A_RUN)

    def _below(
        self, folder: Path, name: str, depth: int, inside: Mapping[str, os.DirEntry[str]], skipped: Collection[str]
    ) -> Iterator[tuple[str, str, object]]:
        for child in sorted(inside):
            entry = inside[child]
            if child.startswith(".") or child in skipped or not entry.is_dir():
                continue
            if entry.is_symlink() or depth == DEEPEST:
                self.num_passed += 1
                continue
            yield from self._found(folder / child, f"{name}/{child}" if name else child, depth + 1)

    def _entry(self, name: str, told_by: str, version: object) -> ListedFolder:
        known = self._read.get(name)
        if known is None or known[0] != version:
            folder = self.root / name
            read = _study if told_by in (PLAN_FILE, FROZEN_FILE) else _run
            known = self._read[name] = (version, read(folder, name, (folder / told_by).stat().st_mtime))
        return known[1]


def _run(folder: Path, name: str, changed: float) -> ListedFolder:
    """A run, from its `run.json`, or its progress if it has none."""
    try:
        result = json.loads((folder / RESULT_FILE).read_bytes())
        metrics = result["metrics"]
        collapsed = ", collapsed" if metrics["collapse"]["collapsed"] else ""
        accuracy, over_length, nll, ece = (_score(metrics.get(name)) for name in _SCORES)
        return ListedFolder(
            name=name,
            is_run=True,
            state=str(result["status"]).replace("_", " ") + collapsed,
            changed=changed,
            model=str(result["model"]),
            optimizer=str(result["optimizer"]),
            seed=int(result["seed"]),
            accuracy=accuracy,
            over_length=over_length,
            nll=nll,
            ece=ece,
            minutes=float(result["wall_seconds"]) / 60,
        )
    except FileNotFoundError:
        return _unfinished(folder, name, changed)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ListedFolder(name=name, is_run=True, state=f"{RESULT_FILE} is torn", changed=changed)


def _unfinished(folder: Path, name: str, changed: float) -> ListedFolder:
    run, step = RunFolder(folder), _last_step(folder / METRICS_FILE)
    options, state = run.options, "no result" if run.divergence is None else "diverged"
    state += "" if step is None else f", step {step:,}"
    model, optimizer = (str(options.get(group, {}).get("name", "")) for group in ("model", "optimizer"))
    about = ListedFolder(name=name, is_run=True, state=state, changed=changed)
    return replace(about, model=model, optimizer=optimizer, seed=options.get("seed"))


def _last_step(metrics: Path) -> int | None:
    """Step of the last complete line in `metrics.csv`."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
        return int(lines[-1].split(b",")[0])
    except (OSError, ValueError, IndexError):
        return None


def _study(folder: Path, name: str, changed: float) -> ListedFolder:
    try:
        trials = StudyPlan.read(folder).trials if (folder / PLAN_FILE).is_file() else ()
    except ConfigError:
        return ListedFolder(name=name, is_run=False, state=f"{PLAN_FILE} is damaged", changed=changed)
    done = sum((folder / TRIALS / trial.name / TRIAL_RESULT).is_file() for trial in trials)
    title = "study of optimizers" if compares_optimizers(folder) else "study"
    return ListedFolder(name=name, is_run=False, state=f"{title}, {done:,} of {len(trials):,} trials", changed=changed)


def _score(stored: Mapping[str, Any] | None) -> Score:
    if not isinstance(stored, Mapping) or not isinstance(stored.get("value"), int | float):
        return Score()
    return Score(float(stored["value"]), stored.get("low"), stored.get("high"))
