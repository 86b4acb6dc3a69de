"""Findings of a comparison: scores, costs and chosen rates of each arm, and warnings to the reader.

A trial whose files cannot be read is left out and named. Findings on several data sets are combined in two numbers for
each optimizer.
"""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.calibration import ReliabilityBin, fold, reliability_curve
from rm_optimizer.core.metrics.effects import SCORES, PairedScores, interquartile_mean, probability_of_improvement
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.optimizer_comparison import setting
from rm_optimizer.experiments.study import Study
from rm_optimizer.experiments.trial import RESULT_FILE, WORK, TrialResult
from rm_optimizer.experiments.verdicts import Verdict, judge
from rm_optimizer.records.codec import JsonRecord

COSTS = (
    *("step_seconds", "train_seconds", "tokens", "passes_per_step", "state_bytes", "peak_memory_bytes", "parameters"),
    *("clipped_share", "top_eigenvalue", "trace", "trace_standard_error", "test_mean_margin", "test_margin_std"),
    *("test_temperature", "test_reward_std", "test_over_length", "test_tie_rate"),
)
"""Numbers of a final trial whose means over seeds are reported without a verdict."""
FEW_SEEDS = 5
NUM_BOOTSTRAP = 2000
"""Number of resamples for intervals over data sets."""
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
    """Medians over seeds of the cost until the target is reached.

    It is NaN if half of the seeds or more miss it.

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
    chosen: setting.ChosenRate
    seeds: tuple[int, ...]
    diverged: int
    scores: dict[str, Estimate]
    per_seed: dict[str, tuple[float, ...]]
    reliability: tuple[tuple[ReliabilityBin, ...], ...]
    means: dict[str, float]
    target: TimeToTarget
    curves: tuple[setting.LearningCurve, ...]


@dataclass(frozen=True, kw_only=True)
class ComparisonFindings(JsonRecord, indent=1, rows="arms"):
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

    frozen: setting.Frozen
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


@dataclass(frozen=True)
class _FinalRun:
    """A finished final run: its seed, result and evaluations, and beta times the margin of each test pair."""

    seed: int
    result: TrialResult
    curve: setting.LearningCurve
    margins: Float[np.ndarray, " pairs"]


def _final_run(work: Path, seed: int, result: TrialResult, num_test: int) -> _FinalRun:
    """The final run with this work folder.

    Raises:
        ConfigError: if a file of it is missing or damaged.
    """
    name = setting.CURVE_FILE
    try:
        curve = setting.LearningCurve.from_json((work / setting.CURVE_FILE).read_text(encoding="utf-8"))
        name = setting.MARGINS_FILE
        with (work / setting.MARGINS_FILE).open("rb") as stream, np.load(stream) as file:
            margins = np.asarray(file["test"], dtype=np.float64)
        if margins.shape != (num_test,):
            raise ValueError(f"{margins.size} margins for {num_test} pairs")
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{work / name} is missing or damaged; remove {RESULT_FILE} next to {WORK} to measure it again"
        ) from error
    return _FinalRun(seed, result, curve, margins)


def findings(folder: Path) -> ComparisonFindings:
    """Findings of the finished trials of a comparison.

    A trial whose files are missing or damaged is left out and named in the warnings.

    Raises:
        ConfigError: if the folder holds no comparison, or runs of one seed differ in pairs, order or first weights.
        NotFinished: if an optimizer has no finished final run.
    """
    frozen, study = setting.Frozen.of(folder), Study(folder)
    test = PreferenceDataset(str(setting.pairs_file(folder, "test")))
    options = frozen.options
    rates: list[RatePoint] = []
    finals: dict[str, list[_FinalRun]] = {arm: [] for arm in options.optimizers}
    diverged, unread = Counter[str](), []
    for planned in study.plan.trials:
        arm, seed, trial = planned.spec["arm"], int(planned.spec["options"]["seed"]), study.trial(planned)
        try:
            if (result := trial.result) is None:
                continue
            if planned.spec["stage"] == setting.TUNE:
                nll, accuracy = (_number(result, name) for name in ("val_nll", "val_accuracy"))
                rates.append(RatePoint(arm=arm, rate=planned.spec["rate"], seed=seed, nll=nll, accuracy=accuracy))
            elif seed < options.seeds and result.status == "diverged":
                diverged[arm] += 1
            elif seed < options.seeds:
                finals[arm].append(_final_run(trial.folder / WORK, seed, result, len(test)))
        except ConfigError as error:
            unread.append(f"left out, {planned.label}: {error}")
    if missing := [arm for arm, runs in finals.items() if not runs]:
        raise NotFinished(
            f"no final run of {', '.join(missing)} is finished yet{''.join(f'; {line}' for line in unread)}; "
            f"rm-opt compare run {folder} continues it"
        )
    _require_paired(finals)
    scores_of: dict[str, dict[float, float]] = {arm: {} for arm in options.optimizers}
    for arm, rate in dict.fromkeys((point.arm, point.rate) for point in rates):
        losses = [point.nll for point in rates if (point.arm, point.rate) == (arm, rate)]
        scores_of[arm][rate] = fmean(math.inf if math.isnan(loss) else loss for loss in losses)  # NaN: diverged
    target = min(scores_of[options.reference].values(), default=math.nan)  # known before any final run
    label, weight = np.array([pair.label for pair in test]), np.array([pair.weight for pair in test])

    def finding(name: str) -> ArmFinding:
        runs = finals[name]
        margins = np.stack([run.margins for run in runs])
        alone = PairedScores(margins, None, test.prompt_ids, label, weight)
        return ArmFinding(
            name=name,
            chosen=setting.chosen_rate(scores_of[name], options.rates),
            seeds=tuple(run.seed for run in runs),
            diverged=diverged[name],
            scores={score: alone.effect(score, num_bootstrap=1000) for score in SCORES},
            per_seed={score: tuple(_number(run.result, value) for run in runs) for score, value in _PER_SEED.items()},
            reliability=tuple(reliability_curve(fold(each, label, weight)) for each in margins),
            means={cost: fmean(_number(run.result, cost) for run in runs) for cost in COSTS},
            target=_time_to(target, [run.curve for run in runs]),
            curves=tuple(run.curve for run in runs),
        )

    arms = tuple(map(finding, finals))
    common = set.intersection(*({run.seed for run in runs} for runs in finals.values()))
    verdicts: Iterable[Verdict] = ()
    if len(common) >= 2 and options.budget != setting.Budget.smoke:  # a smoke budget only tests the procedure
        both = {arm: np.stack([run.margins for run in runs if run.seed in common]) for arm, runs in finals.items()}
        verdicts = judge(both, test.prompt_ids, reference=options.reference, label=label, weight=weight)
    return ComparisonFindings(
        frozen=frozen,
        arms=arms,
        rates=tuple(rates),
        verdicts=tuple(verdicts),
        target=target,
        warnings=(*_warnings(frozen, arms), *unread),
        versions=study.plan.versions,
        machine=study.plan.machine,
        commit=study.plan.commit,
    )


def _number(result: TrialResult, name: str) -> float:
    value = result.values.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _require_paired(finals: Mapping[str, Sequence[_FinalRun]]) -> None:
    """Refuse runs of one seed that differ in their first weights, their training pairs or the order of the pairs."""
    for name, what in (
        ("train_fingerprint", "training pairs"),
        ("initial", "first weights"),
        ("order", "order of the pairs"),
    ):
        seen: dict[int, object] = {}
        for arm, runs in finals.items():
            for run in runs:
                value = run.result.values.get(name)
                if seen.setdefault(run.seed, value) != value:
                    raise ConfigError(
                        f"the {what} of {arm}, seed {run.seed}, differ from the other optimizers; the comparison "
                        "would not be paired: run it in another folder"
                    )


def _time_to(target: float, curves: Sequence[setting.LearningCurve]) -> TimeToTarget:
    """Medians over runs of the first evaluation at or below the target.

    A run that misses it counts as infinite.
    """
    reached = [next((point for point in curve.points if point.nll <= target), None) for curve in curves]
    costs = [(math.inf,) * 3 if point is None else (point.step, point.tokens, point.seconds) for point in reached]
    medians = (float(median(each)) for each in zip(*costs, strict=True))
    steps, tokens, seconds = (value if math.isfinite(value) else math.nan for value in medians)
    return TimeToTarget(steps=steps, tokens=tokens, seconds=seconds, missed=reached.count(None))


def _warnings(frozen: setting.Frozen, arms: Sequence[ArmFinding]) -> list[str]:
    """Sentences on the weaknesses of the comparison."""
    options, found = frozen.options, []
    if options.budget == setting.Budget.smoke:
        found.append("--budget smoke shows that everything works; it judges no optimizer")
    if min(len(arm.seeds) for arm in arms) < options.seeds:
        counts = ", ".join(f"{arm.name} {len(arm.seeds)}" for arm in arms if len(arm.seeds) < options.seeds)
        found.append(f"of {options.seeds} final seeds, fewer are finished: {counts}")
    if min(len(arm.seeds) for arm in arms) < FEW_SEEDS:
        found.append(f"fewer than {FEW_SEEDS} seeds: only large differences can be found")
    for arm in arms:
        if arm.chosen.at_edge:
            found.append(
                f"{arm.name}: the best learning rate {arm.chosen.rate:g} is at the edge of the rates tried: a "
                "better one may lie beyond"
            )
        elif arm.chosen.extra:
            found.append(f"{arm.name}: learning rates added beyond the grid's edge: {arm.chosen.extra}")
        if arm.diverged:
            found.append(f"{arm.name}: {arm.diverged} final seeds diverged; they are in no mean")
    return found


@dataclass(frozen=True, kw_only=True)
class ArmAcross(JsonRecord):
    """An optimizer over several data sets (Agarwal et al., 2021, Section 4.3).

    Args:
        name: name of the optimizer.
        accuracy: interquartile mean of the test accuracy over data sets and seeds.
        improvement: probability that one of its runs has a smaller test NLL than a run of the reference, on a random
            data set; None for the reference.
    """

    name: str
    accuracy: Estimate
    improvement: Estimate | None


@dataclass(frozen=True, kw_only=True)
class AcrossDatasets(JsonRecord, indent=1):
    """Comparisons of the same optimizers on several data sets.

    Args:
        reference: optimizer that the others are compared with.
        test_pairs: digest of the test pairs of each comparison.
        seeds: number of seeds of each optimizer on each data set.
        arms: the optimizers.
    """

    reference: str
    test_pairs: tuple[str, ...]
    seeds: int
    arms: tuple[ArmAcross, ...]


def across_datasets(comparisons: Sequence[ComparisonFindings]) -> AcrossDatasets:
    """Aggregate comparisons of the same optimizers on at least three data sets.

    Args:
        comparisons: findings of the comparisons, each with its own test pairs.

    Raises:
        ConfigError: if there are fewer than three, they differ in optimizers, reference or seeds, or share test pairs.
    """
    options = [found.frozen.options for found in comparisons]
    for name, values in (
        ("optimizers", {tuple(sorted(each.optimizers)) for each in options}),
        ("reference", {each.reference for each in options}),
        ("finished seeds", {len(arm.seeds) for found in comparisons for arm in found.arms}),
    ):
        if len(values) > 1:
            shown = " and ".join(sorted(str(value) for value in values))
            raise ConfigError(f"comparisons on several data sets must have the same {name}, got {shown}")
    tests = tuple(found.frozen.fingerprints["test"] for found in comparisons)
    if len(set(tests)) < len(tests):
        raise ConfigError("comparisons on several data sets must have different test pairs; two of these have the same")
    reference = options[0].reference

    def scores(arm: str, score: str) -> Float[np.ndarray, "datasets seeds"]:
        return np.array([each.per_seed[score] for found in comparisons for each in found.arms if each.name == arm])

    sample = {"num_bootstrap": NUM_BOOTSTRAP, "seed": 0}
    nll = {name: scores(name, "nll") for name in options[0].optimizers}
    arms = tuple(
        ArmAcross(
            name=name,
            accuracy=interquartile_mean(scores(name, "accuracy"), **sample),
            improvement=None if name == reference else probability_of_improvement(-own, -nll[reference], **sample),
        )
        for name, own in nll.items()
    )
    return AcrossDatasets(reference=reference, test_pairs=tests, seeds=nll[reference].shape[1], arms=arms)
