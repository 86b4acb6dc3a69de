"""Printed line for each trial that ends, with the estimated time for the remaining ones."""

from __future__ import annotations

import time

from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.experiments.study.plan import PlannedTrial
from rm_optimizer.experiments.study.trial import TrialResult


class TrialLines:
    """Printer of trials as they end, for the `on_trial` of `Study.run`.

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
