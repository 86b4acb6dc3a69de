"""Learning curve over the number of pairs: its power law, and the number of pairs that a gain needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.tokens.splits import load_training_data
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.study import OnTrial, PlannedTrial, Study, publish
from rm_optimizer.experiments.training_trials import TRAIN, training_trial
from rm_optimizer.experiments.trial import Executor, InlineExecutor
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.folder.record import absolute_source

_EXPONENTS = np.linspace(0.02, 3.0, 150)


@dataclass(frozen=True)
class PowerLaws:
    """Rising laws ``level - scale n^-exponent``, one for each curve.

    It is NaN if no rising law fits.

    Args:
        level: limit of the curve.
        scale: positive factor.
        exponent: positive exponent; larger values approach the limit faster.
    """

    level: Float[np.ndarray, " curves"]
    scale: Float[np.ndarray, " curves"]
    exponent: Float[np.ndarray, " curves"]

    def at(self, numbers: Float[np.ndarray, " numbers"]) -> Float[np.ndarray, "curves numbers"]:
        """Values at these numbers of pairs."""
        return np.asarray(self.level[:, None] - self.scale[:, None] * numbers ** -self.exponent[:, None])

    def reach(self, targets: Float[np.ndarray, " curves"]) -> Float[np.ndarray, " curves"]:
        """Numbers of pairs at which the laws have these values.

        It is infinite if they never do.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = (self.scale / (self.level - targets)) ** (1 / self.exponent)
        return np.where(self.level > targets, found, np.inf)


def fit_power_laws(numbers: Float[np.ndarray, " numbers"], curves: Float[np.ndarray, "curves numbers"]) -> PowerLaws:
    """Best rising law of each curve by least squares, over a grid of exponents from 0.02 to 3.

    Args:
        numbers: numbers of pairs, ascending.
        curves: values at these numbers.
    """
    best, error = np.full((3, len(curves)), np.nan), np.full(len(curves), np.inf)
    for exponent in _EXPONENTS:
        design = np.stack([np.ones_like(numbers), -(numbers**-exponent)], axis=1)
        coefficients = curves @ np.linalg.pinv(design).T
        errors = ((coefficients @ design.T - curves) ** 2).sum(axis=1)
        is_better = (errors < error) & (coefficients[:, 1] > 0)
        best[:2, is_better], best[2, is_better] = coefficients[is_better].T, exponent
        error[is_better] = errors[is_better]
    return PowerLaws(*best)


FEWEST_SIZES = 4
"""Least number of sizes to fit a law with three coefficients."""
FURTHEST = 4
"""Multiple of the largest size up to which a law is trusted."""


@dataclass(frozen=True)
class ScalingPoint(JsonRecord):
    """Validation metrics at one number of training pairs.

    Args:
        num_pairs: training pairs.
        accuracy: accuracy, measured or predicted.
        nll: NLL in nats, measured or predicted.
    """

    num_pairs: int
    accuracy: Estimate
    nll: Estimate


@dataclass(frozen=True)
class MorePairs(JsonRecord):
    """Number of pairs beyond the largest size that a gain in accuracy needs.

    Args:
        gain: gain in accuracy, as a share.
        pairs: further pairs by the fitted law; None if the law needs more than `FURTHEST` times the largest size.
        fewest: lower end of the 95 % interval, at most `FURTHEST` times the largest size less that size.
        most: upper end of the interval; None if it is not known.
    """

    gain: float
    pairs: float | None
    fewest: float
    most: float | None

    @property
    def sentence(self) -> str:
        """The result in words."""
        points = f"{100 * self.gain:g} point{'' if self.gain == 0.01 else 's'} more accuracy"
        if self.pairs is not None and self.most is not None:
            return f"{points}: about {self.pairs:,.0f} more pairs [{self.fewest:,.0f}, {self.most:,.0f}]"
        guess = f" (the fitted curve says {self.pairs:,.0f})" if self.pairs is not None else ""
        return (
            f"{points}: not known; at least {self.fewest:,.0f} more pairs, and these sizes set no upper limit{guess}; "
            "add sizes or seeds, or a better model or labels"
        )


@dataclass(frozen=True)
class ScalingReport(JsonRecord, indent=1, rows="measured"):
    """Learning curve over the number of training pairs.

    Args:
        num_seeds: runs at each size.
        measured: means over seeds, with Student's intervals.
        predicted: values of the fitted laws at twice and four times the largest size.
        more: further pairs for the given gain.
    """

    num_seeds: int
    measured: tuple[ScalingPoint, ...]
    predicted: tuple[ScalingPoint, ...]
    more: MorePairs


def measure_scaling(
    config: TrainConfig,
    folder: Path,
    *,
    sizes: Sequence[int] | None = None,
    num_seeds: int = 3,
    gain: float = 0.02,
    executor: Executor | None = None,
    watch: Callable[[Study], OnTrial] | None = None,
) -> ScalingReport:
    """Train at several sizes and fit the learning curve.

    Repeat a stopped call to continue it.

    Args:
        config: options of the runs; their sizes and seeds are replaced.
        folder: folder of the study.
        sizes: numbers of training pairs; None takes the number of all pairs, halved four times.
        num_seeds: runs at each size, each with its own subset, initial head and order.
        gain: gain in accuracy to plan for, as a share.
        executor: executor of the trials; None runs them in this process.
        watch: function of the planned study that returns the callback for each finished trial.

    Raises:
        ConfigError: if an option is out of its range, or the folder holds another study.
        DataError: if a size is larger than the training pairs, or too few trials finished.
    """
    require(0 < gain < 1, "the gain", "lie in (0, 100) points of accuracy", f"{100 * gain:g}")
    publish(folder, TRAIN, scaling_trials(config, sizes, num_seeds))
    study = Study(folder)
    study.run(executor or InlineExecutor(), on_trial=None if watch is None else watch(study))
    return scaling_report(*_measured(study), gain=gain)


def scaling_trials(config: TrainConfig, sizes: Sequence[int] | None, num_seeds: int) -> list[PlannedTrial]:
    """Trials of every size and seed. For each seed, smaller subsets are contained in larger ones.

    Raises:
        ConfigError: if there are too few sizes or seeds, or the options set an option of the study.
        DataError: if a size is larger than the training pairs.
    """
    if num_seeds < 2:
        raise ConfigError(f"a scaling study needs at least 2 seeds, whose difference is its noise, got {num_seeds}")
    if config.data.streaming != Streaming.off or config.data.max_pairs is not None:
        raise ConfigError("a scaling study sets data.max_pairs itself, of pairs in memory; leave out both options")
    sources = {name: absolute_source(getattr(config.data, name)) for name in ("train", "val")}
    seeds = range(config.seed, config.seed + num_seeds)
    runs = [replace(config, seed=seed, data=replace(config.data, split_seed=seed, **sources)) for seed in seeds]
    largest = min(len(load_training_data(run.data).train) for run in runs)
    chosen = sorted(set(sizes or [largest >> power for power in range(FEWEST_SIZES, -1, -1)]))
    if len(chosen) < FEWEST_SIZES:
        raise ConfigError(f"a curve needs at least {FEWEST_SIZES} different sizes, got {len(chosen)}")
    if chosen[0] < 2 or chosen[-1] > largest:
        raise DataError(f"sizes must lie in [2, {largest:,}], the training pairs, got {chosen[0]:,} to {chosen[-1]:,}")
    return [
        training_trial(f"pairs={size} seed={run.seed}", replace(run, data=replace(run.data, max_pairs=size)))
        for size in chosen
        for run in runs
    ]


def _measured(study: Study) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sizes, then accuracy and NLL as tables of seeds and sizes, for the seeds that finished every size."""
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for planned, row in zip(study.plan.trials, study.rows(), strict=True):
        options = planned.spec["options"]
        if row["state"] == "finished":
            found[options["seed"]][options["data"]["max_pairs"]] = (row["accuracy"], row["nll"])
    sizes = sorted({planned.spec["options"]["data"]["max_pairs"] for planned in study.plan.trials})
    whole = [[by_size[size] for size in sizes] for by_size in found.values() if len(by_size) == len(sizes)]
    if len(whole) < 2:
        raise DataError(
            f"{len(whole)} seeds finished at every size, and a curve needs 2; "
            f"rm-opt compare status {study.folder} says why"
        )
    values = np.array(whole)
    return sizes, values[..., 0], values[..., 1]


def scaling_report(
    sizes: Sequence[int],
    accuracy: Float[np.ndarray, "seeds sizes"],
    nll: Float[np.ndarray, "seeds sizes"],
    *,
    gain: float,
    num_draws: int = 2000,
    seed: int = 0,
) -> ScalingReport:
    """Fit ``level - scale n^-exponent`` to accuracy and to the negative NLL.

    The noise of a run is pooled over sizes. Intervals are percentiles of laws fitted to means with simulated Student
    noise, so few seeds give wide intervals. The noise at one size is treated as independent of other sizes.

    Args:
        sizes: numbers of pairs, ascending.
        accuracy: accuracy of each run.
        nll: NLL of each run.
        gain: gain in accuracy to plan for, as a share.
        num_draws: number of simulated laws for the intervals.
        seed: seed of the simulation.
    """
    numbers = np.array(sizes, dtype=float)
    ahead = [2 * sizes[-1], FURTHEST * sizes[-1]]
    generator = np.random.default_rng(seed)
    laws = [fit_power_laws(numbers, _drawn(values, num_draws, generator)) for values in (accuracy, -nll)]
    accuracies, negative_nll = (law.at(np.array(ahead, dtype=float)) for law in laws)
    measured = tuple(map(ScalingPoint, sizes, map(student_mean, accuracy.T), map(student_mean, nll.T)))
    estimates = ([_estimate(column, len(nll)) for column in values.T] for values in (accuracies, -negative_nll))
    predicted = tuple(map(ScalingPoint, ahead, *estimates))
    reached = laws[0].reach(laws[0].at(numbers[-1:])[:, 0] + gain)  # by the fitted law, then by the simulated laws
    low, high = np.quantile(reached[1:], [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], method="nearest")
    size, furthest, is_known = sizes[-1], FURTHEST * sizes[-1], reached[0] <= FURTHEST * sizes[-1]
    more = MorePairs(
        gain,
        pairs=float(reached[0] - size) if is_known else None,
        fewest=float(min(low, furthest) - size),
        most=float(high - size) if is_known and high <= furthest else None,
    )
    return ScalingReport(len(nll), measured, predicted, more)


def _drawn(values: Float[np.ndarray, "seeds sizes"], num_draws: int, generator: np.random.Generator) -> np.ndarray:
    """Means over seeds, and in the rows below simulated means with noise."""
    num_seeds, num_sizes = values.shape
    freedom, means = num_sizes * (num_seeds - 1), values.mean(axis=0)
    error = np.sqrt(((values - means) ** 2).sum() / freedom / num_seeds)
    noise = error * generator.standard_t(freedom, size=(num_draws, num_sizes))
    return np.concatenate([means[None], means + noise])


def _estimate(values: Float[np.ndarray, " draws"], num_seeds: int) -> Estimate:
    """Value of the fitted law, with the spread of the simulated ones.

    It has no spread if too many of them do not rise.
    """
    drawn = values[1:][~np.isnan(values[1:])]
    if np.isnan(values[0]) or len(drawn) < CONFIDENCE * (len(values) - 1):
        return Estimate(float("nan"), None, num_seeds)
    low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Estimate(float(values[0]), float(drawn.std()), num_seeds, float(low), float(high), IntervalKind.resampled)
