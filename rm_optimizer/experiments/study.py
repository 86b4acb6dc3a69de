"""Study: a fixed list of trials that several processes may run together without repeating any.

Any number of drivers may work on one study. Each trial is measured by the process that holds its claim. If a driver is
killed, its trials continue. The same command waits for them, and repeats no finished trial.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError, Interrupted
from rm_optimizer.experiments.trial import (
    CLAIMED,
    FAILURE_FILE,
    OUTPUT_FILE,
    SPEC_FILE,
    Executor,
    Trial,
    TrialResult,
    TrialSpec,
    stored,
)
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, machine, versions

PLAN_FILE = "plan.json"
"""File with the plan, in the folder of the study."""
FROZEN_FILE = "frozen.json"
"""File with the setting, in the folder of a comparison of optimizers, whose later trials depend on its first ones."""
TRIALS = "trials"
"""Folder inside the study's folder that contains a folder for each trial."""
DAMAGED = "damaged"
"""State of a trial whose result cannot be read."""
WAIT_SECONDS = 1.0
"""Time between two looks at the trials of other processes."""


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


OnTrial = Callable[[PlannedTrial, TrialResult | None], None]
"""Function called with each trial that ended and its result, which is None if no further attempt is made."""


@dataclass(frozen=True, kw_only=True)
class StudyPlan(JsonRecord, indent=1):
    """The plan of a study, `plan.json` in its folder, written before the first trial starts.

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
            ConfigError: if there is no plan, or it is damaged.
        """
        plan = stored(cls, folder / PLAN_FILE, remedy="; plan the study again in another folder")
        if plan is None:
            raise ConfigError(
                f"{folder} holds no study ({PLAN_FILE} is missing); write one with rm-opt compare plan {folder} "
                "OPTION=VALUE,VALUE"
            )
        return plan


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
    labels: dict[str, str] = {}
    for trial in trials:
        if trial.name in labels:
            raise ConfigError(
                f"two trials have the same options: '{labels[trial.name]}' and '{trial.label}'; leave one out"
            )
        labels[trial.name] = trial.label
    if (folder / PLAN_FILE).exists():
        plan = StudyPlan.read(folder)
        planned = {trial.name for trial in plan.trials}
        if plan.task != task or not (extends or planned == labels.keys()):
            raise ConfigError(f"{folder} holds another study, of {len(plan.trials)} trials; choose another folder")
        more = tuple(trial for trial in trials if trial.name not in planned)
        if not more:
            return plan
        plan = replace(plan, trials=(*plan.trials, *more))
    else:
        plan = StudyPlan(task=task, trials=tuple(trials), versions=versions(), machine=machine(), commit=commit())
    write_text(folder / PLAN_FILE, plan.to_json() + "\n")
    return plan


@dataclass(frozen=True)
class StudyStatus:
    """Trials of a study by state.

    Args:
        states: state of each trial by name: finished, diverged, failed, running, waiting or damaged.
        errors: last error of each failed trial, and the reason why a damaged trial cannot be read.
    """

    states: dict[str, str]
    errors: dict[str, str]

    @property
    def counts(self) -> Counter[str]:
        """Number of trials in each state."""
        return Counter(self.states.values())

    @property
    def is_done(self) -> bool:
        """True if every trial has a result."""
        return self.counts.keys() <= {"finished", "diverged"}


class Study:
    """A study in its folder.

    Args:
        folder: the folder, with its plan.

    Raises:
        ConfigError: if there is no plan, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = StudyPlan.read(folder)

    def trial(self, planned: PlannedTrial) -> Trial:
        """The folder of a trial."""
        return Trial(self.folder / TRIALS / planned.name)

    def status(self) -> StudyStatus:
        """State of every trial."""
        rows = list(self.rows())
        errors = {row["trial"]: row["error"] for row in rows if row["state"] in ("failed", DAMAGED)}
        return StudyStatus({row["trial"]: row["state"] for row in rows}, errors)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of one table: each trial's label, state, values, seconds and attempts."""
        for planned in self.plan.trials:
            trial = self.trial(planned)
            about = {"trial": planned.name, "label": planned.label}
            try:
                result, failure = trial.result, trial.failure
            except ConfigError as error:
                yield about | {"state": DAMAGED, "error": str(error)}
                continue
            if result is not None:
                spent = {"seconds": result.seconds, "attempts": result.attempts}
                yield about | {"state": result.status, "error": result.error} | spent | result.values
            else:
                state = "running" if trial.is_claimed else "waiting" if failure is None else "failed"
                yield about | {"state": state, "error": failure.error if failure else None}

    def forget_failures(self) -> int:
        """Remove the records of failed trials so that they may run again, and return their number."""
        trials = [self.trial(planned) for planned in self.plan.trials]
        failed = [trial for trial in trials if trial.failure is not None and trial.result is None]
        for trial in failed:
            (trial.folder / FAILURE_FILE).unlink(missing_ok=True)
        return len(failed)

    def run(self, executor: Executor, *, retries: int = 2, on_trial: OnTrial | None = None) -> StudyStatus:
        """Run every trial that has no result and attempts left, and return the state of all.

        Args:
            executor: executor of the trials.
            retries: number of further attempts at a trial that failed or whose process was killed.
            on_trial: function called with each trial that ended.

        Raises:
            Interrupted: if the user stopped it; the same call continues.
        """
        tell = on_trial or (lambda planned, result: None)
        waiting = deque(
            planned
            for planned, trial in ((each, self.trial(each)) for each in self.plan.trials)
            if trial.result is None and trial.attempts <= retries
        )
        running: list[tuple[PlannedTrial, int, Any]] = []  # with the attempts before this one, and the handles
        elsewhere: list[PlannedTrial] = []  # measured by other processes

        def advance(planned: PlannedTrial, code: int | None = None, before: int = 0) -> None:
            """Start a trial, or settle one whose process ended with a code after so many failed attempts."""
            trial = self.trial(planned)
            if (result := trial.result) is not None:
                tell(planned, result)
            elif code == CLAIMED or (code is None and trial.is_claimed):
                elsewhere.append(planned)
            elif code is None:
                spec = TrialSpec(task=self.plan.task, label=planned.label, spec=planned.spec)
                write_text(trial.folder / SPEC_FILE, spec.to_json() + "\n")
                attempts = trial.attempts  # read before the start, which may raise their number
                running.append((planned, attempts, executor.start(trial.folder)))
            else:
                if trial.attempts == before:  # the process could not record the failure itself
                    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    trial.fail(f"its process {how}; what it printed is in {trial.folder / OUTPUT_FILE}")
                if trial.attempts <= retries:
                    waiting.append(planned)
                else:
                    tell(planned, None)

        try:
            while waiting or running or elsewhere:
                while waiting and len(running) < executor.slots:
                    advance(waiting.popleft())
                deadline = time.monotonic() + WAIT_SECONDS
                while not (ended := [(r, code) for r in running if (code := executor.code(r[2])) is not None]):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.05)
                for one, code in ended:
                    running.remove(one)
                    advance(one[0], code, one[1])
                # Those without a result are started again.
                waiting.extend(planned for planned in elsewhere if not self.trial(planned).is_claimed)
                elsewhere = [planned for planned in elsewhere if planned not in waiting]
        except KeyboardInterrupt:
            executor.stop([one[2] for one in running])
            raise Interrupted("stopped; the same command goes on with the trials that have no result") from None
        return self.status()


class TrialLines:
    """Printer of trials as they end, with the estimated time for the remaining ones.

    It is an `on_trial` of `Study.run`.

    Args:
        done: number of trials that have a result at the start.
        total: number of trials known at the start.
    """

    def __init__(self, done: int, total: int) -> None:
        self._done, self._total, self._ended = done, total, 0
        self._started = time.monotonic()

    @classmethod
    def of(cls, study: Study) -> TrialLines:
        """The lines of a study whose plan is complete."""
        counts = study.status().counts
        return cls(counts["finished"] + counts["diverged"], len(study.plan.trials))

    def grow(self, total: int) -> None:
        """Raise the number of known trials to `total`."""
        self._total = max(self._total, total)

    def __call__(self, planned: PlannedTrial, result: TrialResult | None) -> None:
        """Print a trial that ended."""
        self._ended += 1
        done = self._done + self._ended
        left = (time.monotonic() - self._started) / self._ended * max(0, self._total - done)
        state = "failed" if result is None else f"{result.status} in {result.seconds:.0f} s"
        print(f"[{done}/{self._total}] {planned.label}: {state}; about {left / 60:.0f} min left", flush=True)
