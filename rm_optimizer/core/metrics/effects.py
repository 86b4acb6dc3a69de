"""Effects of trained arms over the same prompts and seeds, their power, and aggregates over data sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import stdtrit
from scipy.stats import ncf, rankdata

from rm_optimizer.core.metrics.calibration import NUM_BINS, equal_width_bins, fold, pair_scores
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import (
    StudentMean,
    cluster_bootstrap,
    cluster_totals,
    crossed_mean,
    inside,
    with_honest_width,
)
from rm_optimizer.errors import ConfigError

Score = Literal["accuracy", "nll", "brier", "ece"]
SCORES: tuple[Score, ...] = ("accuracy", "nll", "brier", "ece")
"""Scores that arms are compared by, in the order of `_scores`."""
Outcome = Literal["better", "worse", "equivalent", "inconclusive"]
"""Words for the result of a comparison."""
ERROR_RATE, POWER = 1 - CONFIDENCE, 0.8
"""Probability of a finding where the arms are equal, and where they differ."""


@dataclass(frozen=True)
class PairedScores:
    """Totals of one arm or two over the prompts, from which the effect of each seed follows.

    Args:
        better: margins of the arm that ought to be better, times beta.
        worse: margins of the other arm; None for the score of `better` itself.
        prompts: prompt of each pair.
        label: probability that the chosen response is the better one, in [0, 1]; None is 1.
        weight: number of pairs that each counts for, positive; None is 1.
    """

    better: Float[np.ndarray, "seeds pairs"]
    worse: Float[np.ndarray, "seeds pairs"] | None
    prompts: Sequence[str]
    label: Float[np.ndarray, " pairs"] | None = None
    weight: Float[np.ndarray, " pairs"] | None = None

    @cached_property
    def sums(self) -> Float[np.ndarray, "prompts terms"]:
        """Share of each prompt in the totals of every arm and seed.

        A pair's terms are its accuracy, NLL and Brier score, its calibration gap in one of the bins, and both counts.
        """
        margins = np.concatenate([self.better] if self.worse is None else [self.better, self.worse])
        ones, margin = np.ones(len(self.prompts)), margins.ravel()
        label, weight = (np.tile(ones if given is None else given, len(margins)) for given in (self.label, self.weight))
        folded = fold(margin, label, weight)
        gaps = np.zeros((len(margin), NUM_BINS))
        gaps[np.arange(len(margin)), equal_width_bins(folded.confidence)] = folded.confidence - folded.outcome
        means = np.stack([*pair_scores(margin, label).values()], axis=1)
        counts = np.stack([label != 0.5, np.ones_like(margin)], axis=1)
        columns = weight[:, None] * np.concatenate([means, gaps, counts], axis=1)
        rows = columns.reshape(*margins.shape, -1).swapaxes(0, 1)
        return cluster_totals(rows.reshape(len(self.prompts), -1), self.prompts)

    def samples(self, score: Score) -> Float[np.ndarray, "prompts terms"]:
        """The sums of the prompts that count in a score; one without a decided pair has no accuracy."""
        return self.sums[self.sums[:, -2] > 0] if score == "accuracy" else self.sums

    def effects(self, totals: np.ndarray, score: Score) -> np.ndarray:
        """Effect of each seed in a score, along the last axis."""
        arms = 1 if self.worse is None else 2
        values = _scores(totals.reshape(*totals.shape[:-1], arms, len(self.better), -1))[..., SCORES.index(score)]
        if self.worse is None:
            return np.asarray(values[..., 0, :])
        return np.asarray((1.0 if score == "accuracy" else -1.0) * (values[..., 0, :] - values[..., 1, :]))

    def per_seed(self, score: Score) -> Float[np.ndarray, " seeds"]:
        """Effect of each seed in a score."""
        return self.effects(self.sums.sum(axis=0), score)

    def mean_effect(self, totals: np.ndarray, score: Score) -> np.ndarray:
        """Mean of the effects of seeds in a score, as a last axis of one."""
        return np.asarray(self.effects(totals, score).mean(axis=-1, keepdims=True))

    def prompt_errors(self, score: Score) -> tuple[float, float]:
        """Standard errors of the mean that prompts cause for every seed, and that they cause for the given models.

        The jackknife's variance of a mean over S seeds contains the prompts' own variance, and a part 1 / S of the
        variance that each pair of a prompt and a seed adds. The variance between seeds contains that part too, so it is
        subtracted here: `(S b - mean over seeds of their own b) / (S - 1)`, as in two-way clustering (Cameron, Gelbach
        & Miller, 2011, doi:10.1198/jbes.2010.07136).
        """
        num_seeds, sums = len(self.better), self.samples(score)
        if num_seeds < 2 or len(sums) < 2:
            return 0.0, 0.0
        jackknife = [
            estimate.standard_error or 0.0
            for statistic in (self.mean_effect, self.effects)
            for estimate in cluster_bootstrap(sums, partial(statistic, score=score), num_bootstrap=0, seed=0)
        ]
        b, own = jackknife[0] ** 2, float(np.mean(np.square(jackknife[1:])))
        return math.sqrt(max(num_seeds * b - own, 0.0) / (num_seeds - 1)), jackknife[0]

    def crossed(self, score: Score, offset: Float[np.ndarray, " seeds"] | float = 0.0) -> StudentMean:
        """Mean effect, with an error over seeds and prompts; see `crossed_mean`.

        Args:
            score: compared metric.
            offset: added to each seed's effect, and known exactly given the seed.
        """
        of_all, of_these = self.prompt_errors(score)
        return crossed_mean(self.per_seed(score) + offset, of_all, len(self.samples(score)), least_error=of_these)

    def effect(self, score: Score, *, num_bootstrap: int = 0) -> Estimate:
        """Mean over seeds of `worse`'s score less `better`'s (accuracy: the other way round), paired throughout.

        The variance of the prompts is the jackknife's over prompts of the mean over seeds; the seeds' is the variance
        between their own effects. One seed has no variance: its interval, if requested, is over prompts for the given
        models.

        Args:
            score: compared metric.
            num_bootstrap: resamples of prompts for the interval of one seed; 0 gives it none.
        """
        lowest = 0.0 if self.worse is None else -1.0
        bounds = None if score == "nll" else (lowest, 1.0)
        if len(self.better) > 1 or not num_bootstrap:
            return inside(self.crossed(score).estimate, bounds)
        sums = self.samples(score)
        if self.worse is not None and np.array_equal(self.better, self.worse):
            return Estimate(0.0, 0.0, len(sums), 0.0, 0.0)
        mean = partial(self.mean_effect, score=score)
        estimate = cluster_bootstrap(sums, mean, num_bootstrap=num_bootstrap, seed=0)[0]
        return with_honest_width(estimate, sums[:, -2 if score == "accuracy" else -1], bounds=bounds)


def holm_adjusted(p_values: Float[np.ndarray, " tests"]) -> Float[np.ndarray, " tests"]:
    """P-values adjusted for several tests: rejecting those below `alpha` errs with probability at most `alpha`.

    The i-th smallest of m becomes `max over j <= i of min(1, (m - j + 1) p_(j))` (Holm, 1979, Scandinavian Journal of
    Statistics 6, 65-70), whatever the dependence between the tests.

    Args:
        p_values: one for each test, in [0, 1].

    Example:
        >>> holm_adjusted(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    scaled = np.minimum(p_values[order] * np.arange(len(p_values), 0, -1), 1.0)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


def power(effect: float, standard_error: float, freedom: float, *, error_rate: float = ERROR_RATE) -> float:
    """Probability that a two-sided Student test of a paired comparison finds a true difference.

    `P(T^2 > t^2)` with `T^2` noncentral F of 1 and `freedom` degrees of freedom and noncentrality `(effect /
    standard_error)^2` (Cohen, 1988, chapter 2). Over n paired seeds the standard error is the differences' deviation
    over `sqrt(n)`, with n - 1 degrees of freedom.

    Args:
        effect: true difference.
        standard_error: standard error of its estimate, positive.
        freedom: degrees of freedom of the standard error.
        error_rate: probability of a finding where the arms are equal; 0.05 is the 95 % interval's.
    """
    if effect == 0:
        return error_rate
    critical = float(-stdtrit(freedom, error_rate / 2))
    return float(ncf.sf(critical**2, 1, freedom, (effect / standard_error) ** 2))


def detectable_effect(standard_error: float, freedom: float, *, error_rate: float = ERROR_RATE) -> float:
    """Smallest true difference that a paired comparison finds with probability `POWER`.

    Args:
        standard_error: standard error of the estimated difference, positive.
        freedom: degrees of freedom of the standard error.
        error_rate: probability of a finding where the arms are equal.
    """

    def excess(shift: float) -> float:
        return power(shift, 1.0, freedom, error_rate=error_rate) - POWER

    highest = 2.0
    while excess(highest) < 0:
        highest *= 2
    return standard_error * float(brentq(excess, 0.0, highest))


def _scores(totals: np.ndarray) -> np.ndarray:
    """Accuracy, NLL, Brier score and ECE from totals over pairs; NaN where no pair counts."""
    ece = np.abs(totals[..., 3:-2]).sum(axis=-1)
    counts = totals[..., -2:]
    sums = np.stack([totals[..., 0], totals[..., 1], totals[..., 2], ece], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / counts[..., [0, 1, 1, 1]])


FEWEST_DATASETS = 3
"""Number of data sets below which a table of each is more useful than an aggregate."""


def interquartile_mean(scores: Float[np.ndarray, "datasets seeds"], *, num_bootstrap: int, seed: int) -> Estimate:
    """Mean of the middle half of all scores (the 25 % trimmed mean, Section 4.3), with its 95 % interval.

    Args:
        scores: score of each seed on each data set, on one scale.
        num_bootstrap: resamples, at least two.
        seed: seed of the resampling.

    Raises:
        ConfigError: with fewer than three data sets or two seeds.

    Example:
        >>> interquartile_mean(np.arange(12.0).reshape(3, 4), num_bootstrap=100, seed=0).value
        5.5
    """

    def middle_mean(arms: Sequence[np.ndarray]) -> np.ndarray:
        (drawn,) = arms
        ordered = np.sort(drawn.reshape(*drawn.shape[:-2], -1), axis=-1)
        cut = ordered.shape[-1] // 4
        return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1))

    return _bootstrapped((scores,), middle_mean, num_bootstrap, seed)


def probability_of_improvement(
    first: Float[np.ndarray, "datasets seeds"],
    second: Float[np.ndarray, "other_datasets other_seeds"],
    *,
    num_bootstrap: int,
    seed: int,
) -> Estimate:
    """Probability that a run of the first arm scores higher than one of the second, on a random data set.

    `P(X > Y) = mean over data sets of U / (N K)` with `U` the Mann-Whitney statistic over N and K seeds, in which a tie
    counts one half (Section 4.3).

    Args:
        first: score of each seed on each data set, higher being better.
        second: scores of the other arm, on the same data sets.
        num_bootstrap: resamples, at least two.
        seed: seed of the resampling.

    Raises:
        ConfigError: with fewer than three data sets or two seeds, or if the arms differ in their data sets.

    Example:
        >>> ones = np.ones((3, 2))
        >>> probability_of_improvement(2 * ones, ones, num_bootstrap=100, seed=0).value
        1.0
    """
    if len(first) != len(second):
        raise ConfigError(f"both arms must have the same data sets, got {len(first)} and {len(second)}")
    n, k = first.shape[-1], second.shape[-1]

    def improvement(arms: Sequence[np.ndarray]) -> np.ndarray:
        ranks = rankdata(np.concatenate(arms, axis=-1), axis=-1)
        u = ranks[..., :n].sum(axis=-1) - n * (n + 1) / 2
        return np.asarray((u / (n * k)).mean(axis=-1))

    return _bootstrapped((first, second), improvement, num_bootstrap, seed)


def _bootstrapped(
    arms: Sequence[np.ndarray], statistic: Callable[[Sequence[np.ndarray]], np.ndarray], num_bootstrap: int, seed: int
) -> Estimate:
    """Statistic of the arms' scores, with an interval from resampled seeds of each data set."""
    for scores in arms:
        if len(scores) < FEWEST_DATASETS:
            raise ConfigError(
                f"an aggregate needs at least {FEWEST_DATASETS} data sets, got {len(scores)}; report each by itself"
            )
        if scores.shape[1] < 2:
            raise ConfigError(f"an aggregate needs at least two seeds on each data set, got {scores.shape[1]}")
    rng, drawn = np.random.default_rng(seed), []
    for scores in arms:
        seeds = rng.integers(scores.shape[1], size=(num_bootstrap, *scores.shape))
        drawn.append(np.take_along_axis(np.broadcast_to(scores, seeds.shape), seeds, axis=-1))
    replicates = statistic(drawn)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(replicates, [tail, 1 - tail])
    value = float(statistic(arms))
    error = float(replicates.std(ddof=1))
    return Estimate(value, error, arms[0].size, float(low), float(high), IntervalKind.resampled)
