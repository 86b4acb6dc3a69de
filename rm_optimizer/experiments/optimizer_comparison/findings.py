"""Findings of a comparison: scores, costs and chosen rates of each arm, and warnings to the reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from rm_optimizer.core.metrics.calibration import ReliabilityBin, fold, reliability_curve
from rm_optimizer.core.metrics.effects import SCORES, paired_effect
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.optimizer_comparison.arm_trial import TUNE
from rm_optimizer.experiments.optimizer_comparison.frozen import Frozen, pairs_file
from rm_optimizer.experiments.optimizer_comparison.measured_trials import FinalRun, MeasuredTrials
from rm_optimizer.experiments.optimizer_comparison.options import Budget
from rm_optimizer.experiments.optimizer_comparison.rates import ChosenRate, chosen_rate, rate_grid
from rm_optimizer.experiments.optimizer_comparison.recorder import CurvePoint, LearningCurve
from rm_optimizer.experiments.optimizer_comparison.stages import Stages
from rm_optimizer.experiments.study import Study
from rm_optimizer.experiments.trial import TrialResult
from rm_optimizer.experiments.verdicts import Verdict, judge
from rm_optimizer.records.codec import JsonRecord

COSTS = (
    *("step_seconds", "train_seconds", "tokens", "passes_per_step", "state_bytes", "peak_memory_bytes", "parameters"),
    *("clipped_share", "top_eigenvalue", "trace", "trace_standard_error", "test_mean_margin", "test_margin_std"),
    *("test_temperature", "test_reward_std", "test_over_length", "test_tie_rate"),
)
"""Numbers of a final trial whose means over seeds are reported without a verdict."""
FEW_SEEDS = 5
_PER_SEED = {"nll": "test_nll", "accuracy": "test_accuracy", "top_eigenvalue": "top_eigenvalue"}
"""Numbers of a final trial that are kept for each seed, by their names in a finding."""


@dataclass(frozen=True, kw_only=True)
class RatePoint(JsonRecord):
    """A tuning run.

    Args:
        arm: optimizer of the run.
        rate: learning rate.
        seed: seed.
        nll: validation NLL of the last weights; NaN if the run diverged.
        accuracy: validation accuracy of the last weights; NaN if the run diverged.
    """

    arm: str
    rate: float
    seed: int
    nll: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class TimeToTarget(JsonRecord):
    """Medians over seeds of the cost until the target is reached; NaN if half of the seeds or more miss it.

    Args:
        steps: optimizer steps.
        tokens: training tokens.
        seconds: seconds of the optimizer steps.
        missed: number of seeds that never reached it.
    """

    steps: float
    tokens: float
    seconds: float
    missed: int


@dataclass(frozen=True, kw_only=True)
class ArmFinding(JsonRecord):
    """An optimizer of a comparison.

    Args:
        name: name of the optimizer.
        chosen: learning rate that tuning chose.
        seeds: final seeds that finished.
        diverged: number of final seeds that diverged.
        scores: test scores, over seeds and prompts.
        per_seed: test NLL, accuracy and top eigenvalue of each finished seed.
        reliability: reliability curve on the test pairs for each finished seed.
        means: means over seeds of `COSTS`.
        target: time to the target NLL.
        curves: evaluations of each finished seed.
    """

    name: str
    chosen: ChosenRate
    seeds: tuple[int, ...]
    diverged: int
    scores: dict[str, Estimate]
    per_seed: dict[str, tuple[float, ...]]
    reliability: tuple[tuple[ReliabilityBin, ...], ...]
    means: dict[str, float]
    target: TimeToTarget
    curves: tuple[LearningCurve, ...]


@dataclass(frozen=True, kw_only=True)
class ComparisonFindings(JsonRecord, indent=1):
    """The outcome of a comparison of optimizers.

    Args:
        frozen: the setting.
        arms: optimizers in the order given.
        rates: tuning runs.
        verdicts: verdicts on the challengers; empty with fewer than two common seeds or the smoke budget.
        target: validation NLL for the time to target: the smallest mean of the reference's tuning runs.
        warnings: sentences that must be shown with every number.
        versions: versions of the packages that affect results.
        machine: processor, cores and system.
        commit: commit of the checkout.
    """

    frozen: Frozen
    arms: tuple[ArmFinding, ...]
    rates: tuple[RatePoint, ...]
    verdicts: tuple[Verdict, ...]
    target: float
    warnings: tuple[str, ...]
    versions: dict[str, str]
    machine: dict[str, str]
    commit: str | None


class NotFinished(ConfigError):
    """An optimizer of a comparison has no finished final run yet."""


def findings(folder: Path) -> ComparisonFindings:
    """Findings of the finished trials of a comparison.

    A trial whose files are missing or damaged is left out and named in the warnings.

    Raises:
        ConfigError: if the folder holds no comparison, or runs of one seed differ in pairs, order or first weights.
        NotFinished: if an optimizer has no finished final run.
    """
    frozen, study = Stages(folder).frozen, Study(folder)
    test = PreferenceDataset.load(str(pairs_file(folder, "test")))
    trials = MeasuredTrials(study, len(test))
    rates = tuple(_rate_points(trials))
    finals = {arm: trials.finals(arm, frozen.options.seeds) for arm in frozen.options.optimizers}
    finished = {arm: runs for arm, (runs, _) in finals.items()}
    if missing := [arm for arm, runs in finished.items() if not runs]:
        unread = "".join(f"; {line}" for line in trials.unread)
        raise NotFinished(
            f"no final run of {', '.join(missing)} is finished yet{unread}; rm-opt compare run {folder} goes on"
        )
    _require_paired(finished)
    options = frozen.options
    scores_of = {arm: _mean_scores([point for point in rates if point.arm == arm]) for arm in finals}
    target = min(scores_of[options.reference].values(), default=math.nan)  # known before any final run
    label, weight = np.array([pair.label for pair in test]), np.array([pair.weight for pair in test])

    def finding(name: str) -> ArmFinding:
        runs, diverged = finals[name]
        margins = _margins(runs)
        sample: dict[str, Any] = {"label": label, "weight": weight, "num_bootstrap": 1000}
        grid = rate_grid(options.config(name).optimizer.lr, options.rates)
        return ArmFinding(
            name=name,
            chosen=chosen_rate(scores_of[name], grid),
            seeds=tuple(run.seed for run in runs),
            diverged=diverged,
            scores={score: paired_effect(margins, None, test.prompt_ids, score, **sample) for score in SCORES},
            per_seed={score: tuple(_number(run.result, value) for run in runs) for score, value in _PER_SEED.items()},
            reliability=tuple(reliability_curve(fold(each, label, weight)) for each in margins),
            means={cost: fmean(_number(run.result, cost) for run in runs) for cost in COSTS},
            target=_time_to(target, [run.curve for run in runs]),
            curves=tuple(run.curve for run in runs),
        )

    arms = tuple(map(finding, finals))
    common = set.intersection(*({run.seed for run in runs} for runs in finished.values()))
    verdicts: Iterable[Verdict] = ()
    if len(common) >= 2 and options.budget != Budget.smoke:  # a smoke budget only tests the procedure
        both = {arm: _margins([run for run in runs if run.seed in common]) for arm, runs in finished.items()}
        verdicts = judge(both, test.prompt_ids, reference=options.reference, label=label, weight=weight)
    return ComparisonFindings(
        frozen=frozen,
        arms=arms,
        rates=rates,
        verdicts=tuple(verdicts),
        target=target,
        warnings=(*_warnings(frozen, arms), *trials.unread),
        versions=study.plan.versions,
        machine=study.plan.machine,
        commit=study.plan.commit,
    )


def _rate_points(trials: MeasuredTrials) -> Iterator[RatePoint]:
    for planned, result in trials.results:
        spec = planned.spec
        if spec["stage"] == TUNE:
            nll, accuracy = (_number(result, name) for name in ("val_nll", "val_accuracy"))
            seed = int(spec["options"]["seed"])
            yield RatePoint(arm=spec["arm"], rate=spec["rate"], seed=seed, nll=nll, accuracy=accuracy)


def _number(result: TrialResult, name: str) -> float:
    value = result.values.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _mean_scores(points: Sequence[RatePoint]) -> dict[float, float]:
    """Mean validation NLL of each rate, infinite if a run diverged."""
    return {
        rate: fmean(math.inf if math.isnan(point.nll) else point.nll for point in points if point.rate == rate)
        for rate in dict.fromkeys(point.rate for point in points)
    }


def _require_paired(finished: Mapping[str, Sequence[FinalRun]]) -> None:
    """Refuse runs of one seed that differ in their first weights, their training pairs or the order of the pairs."""
    for name, what in (
        ("train_fingerprint", "training pairs"),
        ("initial", "first weights"),
        ("order", "order of the pairs"),
    ):
        seen: dict[int, object] = {}
        for arm, runs in finished.items():
            for run in runs:
                value = run.result.values.get(name)
                if seen.setdefault(run.seed, value) != value:
                    raise ConfigError(
                        f"the {what} of {arm}, seed {run.seed}, are not those of the other optimizers; the comparison "
                        "would not be paired: run it in another folder"
                    )


def _time_to(target: float, curves: Sequence[LearningCurve]) -> TimeToTarget:
    """Medians over runs of the first evaluation at or below the target; a run that misses it counts as infinite."""
    reached = [next((point for point in curve.points if point.nll <= target), None) for curve in curves]

    def middle(values: Sequence[float]) -> float:
        found = median(values)
        return found if math.isfinite(found) else math.nan

    def of(name: str, point: CurvePoint | None) -> float:
        return math.inf if point is None else float(getattr(point, name))

    return TimeToTarget(
        steps=middle([of("step", point) for point in reached]),
        tokens=middle([of("tokens", point) for point in reached]),
        seconds=middle([of("seconds", point) for point in reached]),
        missed=sum(point is None for point in reached),
    )


def _margins(runs: Sequence[FinalRun]) -> np.ndarray:
    return np.stack([run.margins for run in runs])


def _warnings(frozen: Frozen, arms: Sequence[ArmFinding]) -> list[str]:
    """Sentences on the weaknesses of the comparison."""
    options, found = frozen.options, []
    if options.budget == Budget.smoke:
        found.append("--budget smoke shows that everything works; it judges no optimizer")
    if min(len(arm.seeds) for arm in arms) < options.seeds:
        counts = ", ".join(f"{arm.name} {len(arm.seeds)}" for arm in arms if len(arm.seeds) < options.seeds)
        found.append(f"of {options.seeds} final seeds, fewer are finished: {counts}")
    if min(len(arm.seeds) for arm in arms) < FEW_SEEDS:
        found.append(f"fewer than {FEW_SEEDS} seeds: only large differences can be found")
    for arm in arms:
        if arm.chosen.at_edge:
            found.append(
                f"{arm.name}: the best learning rate {arm.chosen.rate:g} stands at the edge of those tried: a better "
                "one may lie beyond"
            )
        elif arm.chosen.extra:
            found.append(f"{arm.name}: learning rates added beyond the grid's edge: {arm.chosen.extra}")
        if arm.diverged:
            found.append(f"{arm.name}: {arm.diverged} final seeds diverged; they are in no mean")
    return found
