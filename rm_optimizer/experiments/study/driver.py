"""Driver of a study: it starts trials without a result, repeats failed ones, and reports the state of all.

Any number of drivers may work on one study. Each trial is measured by the process that holds its claim. If a driver is
killed, its trials continue. The same command waits for them, and repeats no finished trial.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError, Interrupted
from rm_optimizer.experiments.study.executors import Executor
from rm_optimizer.experiments.study.plan import PlannedTrial, StudyPlan
from rm_optimizer.experiments.study.trial import (
    CLAIMED,
    FAILURE_FILE,
    OUTPUT_FILE,
    SPEC_FILE,
    Trial,
    TrialResult,
    TrialSpec,
)
from rm_optimizer.records.files import write_text

TRIALS = "trials"
"""Folder inside the study's folder that contains a folder for each trial."""
WAIT_SECONDS = 1.0
DAMAGED = "damaged"
"""State of a trial whose result cannot be read."""
OnTrial = Callable[[PlannedTrial, TrialResult | None], None]
"""Function called with each trial that ended and its result, which is None if no further attempt is made."""


@dataclass(frozen=True)
class StudyStatus:
    """Trials of a study by state.

    Args:
        states: state of each trial by name: finished, diverged, failed, running, waiting or damaged.
        seconds: wall seconds of each finished or diverged trial.
        errors: last error of each failed trial, and the reason why a damaged trial cannot be read.
    """

    states: dict[str, str]
    seconds: tuple[float, ...]
    errors: dict[str, str]

    @property
    def counts(self) -> Counter[str]:
        """Number of trials in each state."""
        return Counter(self.states.values())

    @property
    def is_done(self) -> bool:
        """True if every trial has a result."""
        return self.counts.keys() <= {"finished", "diverged"}


@dataclass(frozen=True)
class Study:
    """A study in its folder.

    Args:
        folder: the folder, with its plan.
    """

    folder: Path
    plan: StudyPlan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", StudyPlan.read(self.folder))

    def trial(self, planned: PlannedTrial) -> Trial:
        """The folder of a trial."""
        return Trial(self.folder / TRIALS / planned.name)

    def status(self) -> StudyStatus:
        """State of every trial."""
        states: dict[str, str] = {}
        seconds: list[float] = []
        errors: dict[str, str] = {}
        for row in self.rows():
            states[row["trial"]] = row["state"]
            if "seconds" in row:
                seconds.append(row["seconds"])
            elif row["state"] in ("failed", DAMAGED):
                errors[row["trial"]] = row["error"]
        return StudyStatus(states, tuple(seconds), errors)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of one table: each trial's label, state, values, seconds and attempts."""
        for planned in self.plan.trials:
            trial = self.trial(planned)
            about = {"trial": planned.name, "label": planned.label}
            try:
                result, failure = trial.result, trial.failure
                state = trial.state if result is None else result.status
            except ConfigError as error:
                yield about | {"state": DAMAGED, "error": str(error)}
                continue
            if result is None:
                yield about | {"state": state, "error": failure.error if failure else None}
            else:
                spent = {"seconds": result.seconds, "attempts": result.attempts}
                yield about | {"state": state, "error": result.error} | spent | result.values

    def forget_failures(self) -> int:
        """Remove the records of failed trials so that they may run again, and return their number."""
        failed = [self.trial(planned) for planned in self.plan.trials]
        failed = [trial for trial in failed if trial.failure is not None and trial.result is None]
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
        work = _Work(self, executor, retries, on_trial or (lambda planned, result: None))
        try:
            work.to_the_end()
        except KeyboardInterrupt:
            executor.stop()
            raise Interrupted("stopped; the same command goes on with the trials that have no result") from None
        return self.status()


@dataclass
class _Work:
    """State of a driver: trials that wait, that it runs, and that other processes run."""

    study: Study
    executor: Executor
    retries: int
    on_trial: OnTrial
    waiting: deque[PlannedTrial] = field(default_factory=deque)
    running: dict[Path, PlannedTrial] = field(default_factory=dict)
    elsewhere: list[PlannedTrial] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)

    def to_the_end(self) -> None:
        for planned in self.study.plan.trials:
            trial = self.study.trial(planned)
            if trial.result is None and self._may_run(trial):
                self.waiting.append(planned)
        while self.waiting or self.running or self.elsewhere:
            while self.waiting and len(self.running) < self.executor.slots:
                self._start(self.waiting.popleft())
            for folder, code in self.executor.ended(WAIT_SECONDS):
                self._end(self.running.pop(folder), code)
            self._look_elsewhere()

    def _may_run(self, trial: Trial) -> bool:
        return trial.attempts <= self.retries

    def _start(self, planned: PlannedTrial) -> None:
        trial = self.study.trial(planned)
        if trial.result is not None:
            self.on_trial(planned, trial.result)
            return
        if trial.is_claimed:
            self.elsewhere.append(planned)
            return
        self.attempts[planned.name] = trial.attempts
        spec = TrialSpec(task=self.study.plan.task, label=planned.label, spec=planned.spec)
        write_text(trial.folder / SPEC_FILE, spec.to_json() + "\n")
        self.running[trial.folder] = planned
        self.executor.start(trial.folder)

    def _end(self, planned: PlannedTrial, code: int) -> None:
        trial = self.study.trial(planned)
        if (result := trial.result) is not None:
            self.on_trial(planned, result)
        elif code == CLAIMED:
            self.elsewhere.append(planned)
        else:
            if trial.attempts == self.attempts[planned.name]:  # the process could not record the failure itself
                ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                trial.fail(f"its process {ended}; what it printed is in {trial.folder / OUTPUT_FILE}")
            if self._may_run(trial):
                self.waiting.append(planned)
            else:
                self.on_trial(planned, None)

    def _look_elsewhere(self) -> None:
        """Move ended trials of other processes to the waiting ones, where those without a result are started again."""
        ended = [planned for planned in self.elsewhere if not self.study.trial(planned).is_claimed]
        self.elsewhere = [planned for planned in self.elsewhere if planned not in ended]
        self.waiting.extend(ended)
