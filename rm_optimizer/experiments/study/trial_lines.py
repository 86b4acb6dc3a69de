"""A line for each trial that ends, with the time that the others will take."""

from __future__ import annotations

import time

from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.experiments.study.plan import PlannedTrial
from rm_optimizer.experiments.study.trial import TrialResult


class TrialLines:
    """Prints trials as they end; what `Study.run` takes as `on_trial`.

    Args:
        done: trials that have a result before the first one starts.
        total: trials that are known.
    """

    def __init__(self, done: int, total: int) -> None:
        self._done, self._total, self._ended = done, total, 0
        self._started = time.monotonic()

    @classmethod
    def of(cls, study: Study) -> TrialLines:
        """The lines of a study of a fixed plan."""
        counts = study.status().counts
        return cls(counts["finished"] + counts["diverged"], len(study.plan.trials))

    def grow(self, total: int) -> None:
        """Count trials that are planned by now."""
        self._total = max(self._total, total)

    def __call__(self, planned: PlannedTrial, result: TrialResult | None) -> None:
        """Print a trial that ended."""
        self._ended += 1
        done = self._done + self._ended
        left = (time.monotonic() - self._started) / self._ended * max(0, self._total - done)
        state = "failed" if result is None else f"{result.status} in {result.seconds:.0f} s"
        print(f"[{done}/{self._total}] {planned.label}: {state}; about {left / 60:.0f} min left", flush=True)
