"""The plan of a study: a fixed list of trials, written before the first one starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, machine, versions

PLAN_FILE = "plan.json"
"""File with the plan, in the folder of the study."""
FROZEN_FILE = "frozen.json"
"""File with the setting, in the folder of a comparison of optimizers, whose later trials depend on its first ones."""


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """A trial of a plan.

    Args:
        name: hash of its identity, which is the name of its folder.
        label: short text that distinguishes it from the other trials.
        spec: JSON values with which the task is called.
    """

    name: str
    label: str
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StudyPlan(JsonRecord, indent=1):
    """The plan of a study, `plan.json` in its folder.

    Args:
        task: function that measures a trial, as `package.module:name`.
        trials: the trials, in the order in which they start.
        versions: versions of the packages that affect results.
        machine: processor, cores and system of the machine that planned it.
        commit: commit of the checkout.
    """

    task: str
    trials: tuple[PlannedTrial, ...]
    versions: dict[str, str]
    machine: dict[str, str]
    commit: str | None

    @classmethod
    def read(cls, folder: Path) -> StudyPlan:
        """The plan of the study in a folder.

        Raises:
            ConfigError: if there is none, or it is damaged.
        """
        path = folder / PLAN_FILE
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{folder} holds no study ({PLAN_FILE} is missing); write one with rm-opt compare plan {folder} "
                "OPTION=VALUE,VALUE"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged; plan the study again in another folder") from error


def compares_optimizers(folder: Path) -> bool:
    """True if a folder holds a comparison of optimizers, whose setting is written before its plan."""
    return (folder / FROZEN_FILE).is_file()


def planned_trial(label: str, spec: Mapping[str, Any], identity: Mapping[str, Any] | None = None) -> PlannedTrial:
    """A trial whose name is the hash of its identity.

    Args:
        label: short text that distinguishes it from the other trials.
        spec: JSON values with which the task is called.
        identity: values that determine its result; None means the spec.
    """
    text = json.dumps(spec if identity is None else identity, default=str, sort_keys=True)
    return PlannedTrial(name=hashlib.sha256(text.encode()).hexdigest()[:16], label=label, spec=dict(spec))


def _distinct_names(trials: Sequence[PlannedTrial]) -> set[str]:
    """Names of the trials.

    Raises:
        ConfigError: if two are the same.
    """
    labels: dict[str, str] = {}
    for trial in trials:
        if trial.name in labels:
            raise ConfigError(
                f"two trials have the same options: '{labels[trial.name]}' and '{trial.label}'; leave one out"
            )
        labels[trial.name] = trial.label
    return set(labels)


def publish(folder: Path, task: str, trials: Sequence[PlannedTrial], *, extends: bool = False) -> StudyPlan:
    """Write the plan of a study, or read it if the folder holds the same one.

    Args:
        folder: folder of the study.
        task: function that measures a trial, as `package.module:name`.
        trials: the trials.
        extends: True to add new trials to the plan in the folder.

    Raises:
        ConfigError: if two trials have the same identity, or the folder holds another plan.
    """
    names = _distinct_names(trials)
    if (folder / PLAN_FILE).exists():
        plan = StudyPlan.read(folder)
        planned = {trial.name for trial in plan.trials}
        if plan.task != task or not (extends or planned == names):
            raise ConfigError(f"{folder} holds another study, of {len(plan.trials)} trials; choose another folder")
        more = tuple(trial for trial in trials if trial.name not in planned)
        if not more:
            return plan
        plan = replace(plan, trials=(*plan.trials, *more))
    else:
        plan = StudyPlan(task=task, trials=tuple(trials), versions=versions(), machine=machine(), commit=commit())
    write_text(folder / PLAN_FILE, plan.to_json() + "\n")
    return plan
