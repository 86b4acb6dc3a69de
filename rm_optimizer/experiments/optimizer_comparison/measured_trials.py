"""Measured trials of a comparison; a trial whose files cannot be read is left out and named."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.optimizer_comparison.arm_trial import CURVE_FILE, FINAL, MARGINS_FILE
from rm_optimizer.experiments.optimizer_comparison.recorder import LearningCurve
from rm_optimizer.experiments.study import PlannedTrial, Study
from rm_optimizer.experiments.trial import RESULT_FILE, WORK, TrialResult


@dataclass(frozen=True)
class FinalRun:
    """A finished final run.

    Args:
        seed: seed of the run.
        result: result of the run.
        curve: evaluations of the run.
        margins: beta times the margin of each test pair.
    """

    seed: int
    result: TrialResult
    curve: LearningCurve
    margins: Float[np.ndarray, " pairs"]


@dataclass
class MeasuredTrials:
    """Trials of a comparison.

    Args:
        study: the comparison's trials.
        num_test: number of test pairs.
        unread: sentences on the trials that cannot be read.
    """

    study: Study
    num_test: int
    unread: list[str] = field(default_factory=list)

    @cached_property
    def results(self) -> list[tuple[PlannedTrial, TrialResult]]:
        """Trials with a result, in the order of the plan."""
        return list(self._results())

    def _results(self) -> Iterator[tuple[PlannedTrial, TrialResult]]:
        for planned in self.study.plan.trials:
            try:
                result = self.study.trial(planned).result
            except ConfigError as error:
                self.unread.append(f"left out, {planned.label}: {error}")
                continue
            if result is not None:
                yield planned, result

    def finals(self, arm: str, num_seeds: int) -> tuple[list[FinalRun], int]:
        """Finished final runs of an optimizer in the order of their seeds, and the number of diverged ones."""
        runs, diverged = [], 0
        for planned, result in self.results:
            seed = int(planned.spec["options"]["seed"])
            if (planned.spec["stage"], planned.spec["arm"]) != (FINAL, arm) or seed >= num_seeds:
                continue
            if result.status == "diverged":
                diverged += 1
            elif (run := self._final(planned, seed, result)) is not None:
                runs.append(run)
        return runs, diverged

    def _final(self, planned: PlannedTrial, seed: int, result: TrialResult) -> FinalRun | None:
        work, name = self.study.trial(planned).folder / WORK, CURVE_FILE
        try:
            curve = LearningCurve.from_json((work / CURVE_FILE).read_text(encoding="utf-8"))
            name = MARGINS_FILE
            with (work / MARGINS_FILE).open("rb") as stream, np.load(stream) as file:
                margins = np.asarray(file["test"], dtype=np.float64)
            if margins.shape != (self.num_test,):
                raise ValueError(f"{margins.size} margins for {self.num_test} pairs")
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
            self.unread.append(
                f"left out, {planned.label}: {work / name} is missing or damaged; remove {RESULT_FILE} "
                f"beside {WORK} to measure it again"
            )
            return None
        return FinalRun(seed, result, curve, margins)
