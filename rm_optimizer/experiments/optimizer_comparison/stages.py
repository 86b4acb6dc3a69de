"""Stages of a comparison. Each is a list of trials that depends on the results of the stages before.

Freezing writes the setting that is equal for all arms. Tuning tries the same number of learning rates for every
optimizer, on seeds that are used only for tuning. The final stage runs new seeds, the same for every arm, at the chosen
rates. All trials are in one study, so a comparison that was killed continues with the trials that have no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.optimizer_comparison.arm_trial import FINAL, TASK, TUNE, arm_trial
from rm_optimizer.experiments.optimizer_comparison.setting import FIRST_TUNING_SEED, Frozen
from rm_optimizer.experiments.study import (
    FROZEN_FILE,
    PLAN_FILE,
    TRIALS,
    OnTrial,
    PlannedTrial,
    Study,
    StudyStatus,
    publish,
)
from rm_optimizer.experiments.trial import Executor, Trial, TrialResult
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.records.codec import JsonRecord

ADAMW = "adamw"
HALF_DECADE = math.sqrt(10.0)
"""Factor from one learning rate to the next."""
MOST_EXTRA = 2
"""Most rates that are added beyond the edges of the grid."""


@dataclass(frozen=True, kw_only=True)
class ChosenRate(JsonRecord):
    """The learning rate that tuning chose.

    Args:
        rate: learning rate; None if every run of every rate diverged.
        nll: mean validation NLL of its tuning runs, which is biased low because the rate was chosen by it.
        at_edge: True if the rate is the smallest or largest one tried, so that a better one may lie beyond.
        extra: number of rates added beyond the grid.
    """

    rate: float | None
    nll: float
    at_edge: bool
    extra: int


def rate_grid(center: float, count: int) -> tuple[float, ...]:
    """Learning rates in half decades around a center, to three digits.

    Args:
        center: rate of the preset.
        count: number of rates, odd.

    Example:
        >>> rate_grid(1e-4, 3)
        (3.16e-05, 0.0001, 0.000316)
    """
    return tuple(_rounded(center * HALF_DECADE**power) for power in range(-(count // 2), count // 2 + 1))


def next_rate(scores: Mapping[float, float], grid: Sequence[float]) -> float | None:
    """The next rate to try beyond an edge if the best rate is at that edge.

    It is None if no further rate is tried.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        grid: rates of the first grid.
    """
    best = chosen_rate(scores, grid)
    if best.rate is None or not best.at_edge or best.extra >= MOST_EXTRA:
        return None
    return _rounded(best.rate / HALF_DECADE if best.rate == min(scores) else best.rate * HALF_DECADE)


def chosen_rate(scores: Mapping[float, float], grid: Sequence[float]) -> ChosenRate:
    """The rate with the smallest mean validation NLL, or the smaller of two equally good ones.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        grid: rates of the first grid.
    """
    tried = sorted(scores)
    best = min(tried, key=lambda rate: scores[rate])
    is_known = math.isfinite(scores[best])
    return ChosenRate(
        rate=best if is_known else None,
        nll=scores[best] if is_known else math.nan,
        at_edge=is_known and best in (tried[0], tried[-1]),
        extra=len(tried) - len(grid),
    )


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


@dataclass(frozen=True)
class TunedArm:
    """Tuning of an optimizer.

    Args:
        trials: tuning runs that are known so far.
        chosen: the learning rate that tuning chose; None until its runs are finished.
        adamw_lr: learning rate of its AdamW part; None if it has none, or the preset's is used.
    """

    trials: Sequence[PlannedTrial] = ()
    chosen: ChosenRate | None = None
    adamw_lr: float | None = None


class Stages:
    """The trials of a comparison in its folder.

    Args:
        folder: the folder, which holds a frozen setting.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trials: dict[tuple[object, ...], PlannedTrial] = {}

    @cached_property
    def frozen(self) -> Frozen:
        """The comparison's setting.

        Raises:
            ConfigError: if the folder holds no comparison.
        """
        frozen = Frozen.read(self.folder)
        if frozen is None:
            raise ConfigError(
                f"{self.folder} holds no comparison of optimizers ({FROZEN_FILE} is missing); start one with "
                f"rm-opt compare --optimizers adamw,muon --data PAIRS --output {self.folder}"
            )
        return frozen

    @property
    def num_planned(self) -> int:
        """Number of trials of the whole comparison, without rates beyond the grids."""
        options = self.frozen.options
        return len(options.optimizers) * (options.rates * options.tuning_seeds + options.seeds)

    def tuned(self, arm: str) -> TunedArm:
        """Tuning of an optimizer; without runs if it uses the rate tuned for AdamW and that is not known yet."""
        options, adamw_lr = self.frozen.options, None
        if OPTIMIZERS[arm].name == "muon" and ADAMW in options.optimizers:
            if (adamw := self.tuned(ADAMW).chosen) is None:
                return TunedArm()
            adamw_lr = adamw.rate
        grid = rate_grid(options.config(arm).optimizer.lr, options.rates)
        rates, trials, scores = list(grid), [], {}
        for rate in rates:  # which grows
            runs = [
                self._trial(TUNE, arm, rate, FIRST_TUNING_SEED + number, adamw_lr)
                for number in range(options.tuning_seeds)
            ]
            trials += runs
            results = [result for run in runs if (result := self.result(run)) is not None]
            if len(results) == len(runs):
                losses = [result.values.get("val_nll") for result in results]  # None for a diverged run
                scores[rate] = fmean(loss if isinstance(loss, int | float) else math.inf for loss in losses)
            if len(scores) == len(rates) and (extra := next_rate(scores, grid)) is not None:
                rates.append(extra)
        chosen = chosen_rate(scores, grid) if len(scores) == len(rates) else None
        return TunedArm(trials, chosen, adamw_lr)

    def trials(self) -> list[PlannedTrial]:
        """All trials that are known so far: tuning runs, then final runs seed by seed once all are tuned.

        An optimizer whose rates all diverged has no final runs.
        """
        options = self.frozen.options
        tuned = {arm: self.tuned(arm) for arm in options.optimizers}
        trials = [trial for each in tuned.values() for trial in each.trials]
        if all(each.chosen is not None for each in tuned.values()):
            trials += [
                self._trial(FINAL, arm, each.chosen.rate, seed, each.adamw_lr)
                for seed in range(options.seeds)
                for arm, each in tuned.items()
                if each.chosen is not None and each.chosen.rate is not None
            ]
        return trials

    def result(self, planned: PlannedTrial) -> TrialResult | None:
        """The result of a trial; None if it has none yet."""
        return Trial(self.folder / TRIALS / planned.name).result

    def run(
        self,
        executor: Executor,
        *,
        retries: int = 2,
        on_trial: OnTrial | None = None,
        on_stage: Callable[[int], None] = lambda num_trials: None,
    ) -> StudyStatus:
        """Run stage after stage until every trial has a result.

        Args:
            executor: executor of the trials.
            retries: number of further attempts at a trial that failed or whose process was killed.
            on_trial: function called with each trial that ended.
            on_stage: function called with the number of trials known so far, at the start of each stage.

        Raises:
            Interrupted: if the user stopped it; the same call continues.
        """
        while True:
            known = self.trials()
            publish(self.folder, TASK, known, extends=(self.folder / PLAN_FILE).exists())
            on_stage(len(known))
            status = Study(self.folder).run(executor, retries=retries, on_trial=on_trial)
            if not status.is_done or len(self.trials()) == len(known):
                return status

    def _trial(self, stage: str, arm: str, rate: float, seed: int, adamw_lr: float | None) -> PlannedTrial:
        key = (stage, arm, rate, seed, adamw_lr)
        if key not in self._trials:
            self._trials[key] = arm_trial(self.frozen, self.folder, stage, arm, rate, seed, adamw_lr=adamw_lr)
        return self._trials[key]
