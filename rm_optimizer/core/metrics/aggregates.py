"""Aggregates of arms over several data sets (Agarwal et al., 2021, arXiv 2108.13264).

Intervals are percentiles of a stratified bootstrap: the seeds of each data set are resampled, the data sets are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.errors import ConfigError

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
    return _bootstrapped((scores,), lambda drawn: _middle_mean(drawn[0]), num_bootstrap, seed)


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
    return _bootstrapped((first, second), lambda drawn: _improvement(*drawn), num_bootstrap, seed)


def _middle_mean(scores: np.ndarray) -> np.ndarray:
    """25 % trimmed mean over the last two axes."""
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = ordered.shape[-1] // 4
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1))


def _improvement(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    n, k = first.shape[-1], second.shape[-1]
    ranks = rankdata(np.concatenate([first, second], axis=-1), axis=-1)
    u = ranks[..., :n].sum(axis=-1) - n * (n + 1) / 2
    return np.asarray((u / (n * k)).mean(axis=-1))


def _bootstrapped(
    arms: tuple[np.ndarray, ...], statistic: Callable[[list[np.ndarray]], np.ndarray], num_bootstrap: int, seed: int
) -> Estimate:
    for scores in arms:
        if len(scores) < FEWEST_DATASETS:
            raise ConfigError(
                f"an aggregate needs at least {FEWEST_DATASETS} data sets, got {len(scores)}; report each by itself"
            )
        if scores.shape[1] < 2:
            raise ConfigError(f"an aggregate needs at least two seeds on each data set, got {scores.shape[1]}")
    rng = np.random.default_rng(seed)
    drawn = [_resampled(scores, num_bootstrap, rng) for scores in arms]
    replicates = statistic(drawn)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(replicates, [tail, 1 - tail])
    value = float(statistic(list(arms)))
    error = float(replicates.std(ddof=1))
    return Estimate(value, error, arms[0].size, float(low), float(high), IntervalKind.resampled)


def _resampled(scores: np.ndarray, num_bootstrap: int, rng: np.random.Generator) -> np.ndarray:
    """Scores with resampled seeds of each data set, with a leading axis of resamples."""
    chosen = rng.integers(scores.shape[1], size=(num_bootstrap, *scores.shape))
    return np.take_along_axis(np.broadcast_to(scores, chosen.shape), chosen, axis=-1)
