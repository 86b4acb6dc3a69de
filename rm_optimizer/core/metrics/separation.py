"""Separation of better from worse responses: area under the ROC curve, rates at thresholds, and collapse."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from rm_optimizer.core.metrics.estimate import UNKNOWN, Estimate
from rm_optimizer.core.metrics.intervals import cluster_totals, with_honest_width, with_student_interval


@dataclass(frozen=True)
class ThresholdRates:
    """Rates of a rule that accepts every response with a reward of at least the threshold.

    Args:
        threshold: least reward that is accepted.
        tpr: share of the better responses that are accepted.
        fpr: share of the other responses that are accepted.
        fnr: share of the better responses that are not, `1 - tpr`.
    """

    threshold: float
    tpr: float
    fpr: float
    fnr: float


def threshold_rates(
    better: Float[np.ndarray, " pairs"],
    worse: Float[np.ndarray, " pairs"],
    weight: Float[np.ndarray, " pairs"],
    thresholds: Iterable[float],
) -> tuple[ThresholdRates, ...]:
    """Rates at each threshold, in the order given; NaN without pairs.

    Raises:
        ValueError: if a threshold is not finite.

    Example:
        >>> threshold_rates(np.array([2.0, 0.5]), np.array([1.0, 0.0]), np.ones(2), [1.0])
        (ThresholdRates(threshold=1.0, tpr=0.5, fpr=0.5, fnr=0.5),)
    """
    found = []
    for threshold in map(float, thresholds):
        if not math.isfinite(threshold):
            raise ValueError(f"a threshold must be finite, got {threshold}")
        tpr, fpr = (
            float(np.average(side >= threshold, weights=weight)) if side.size else math.nan for side in (better, worse)
        )
        found.append(ThresholdRates(threshold, tpr, fpr, 1 - tpr))
    return tuple(found)


def roc_auc(
    better: Float[np.ndarray, " pairs"],
    worse: Float[np.ndarray, " pairs"],
    weight: Float[np.ndarray, " pairs"],
    cluster: Int[np.ndarray, " pairs"],
    *,
    with_interval: bool,
) -> Estimate:
    """Area under the ROC curve of better against worse responses of all prompts, ties one half.

    It is the probability that a random better response has a higher reward than a random worse one of any prompt, so it
    is below the accuracy where prompts differ in their level of reward. The variance is the variance of the placements,
    summed over each prompt (DeLong et al., 1988, doi:10.2307/2531595; Obuchowski, 1997, for clusters), with Student's
    interval over the prompts.

    Args:
        better: rewards of the better responses.
        worse: rewards of the other response of each pair.
        weight: number of pairs that each counts for.
        cluster: prompt of each pair.
        with_interval: True for a 95 % interval in addition to the standard error.

    Example:
        >>> rewards = np.array([2.0, 1.0]), np.array([1.5, 0.0])
        >>> roc_auc(*rewards, np.ones(2), np.arange(2), with_interval=False).value
        0.75
    """
    if not better.size:
        return UNKNOWN
    above = _share_below(worse, weight, better)
    value = float(np.average(above, weights=weight))
    influence = weight * (above + 1 - _share_below(better, weight, worse) - 2 * value)
    totals = cluster_totals(np.stack([influence, weight], axis=1), cluster.tolist())
    count = len(totals)
    if count < 2:
        return Estimate(value, None, count)
    error = math.sqrt(count / (count - 1) * float((totals[:, 0] ** 2).sum())) / float(weight.sum())
    estimate = Estimate(value, error, count)
    shown = with_student_interval(estimate) if with_interval else estimate
    return with_honest_width(shown, totals[:, 1], bounds=(0.0, 1.0))


def _share_below(values: np.ndarray, weight: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Share of the values, by weight, below each number of `of`; equal ones count one half."""
    order = np.argsort(values)
    running, ordered = np.concatenate([[0.0], np.cumsum(weight[order])]), values[order]
    sides = [running[np.searchsorted(ordered, of, side)] for side in ("left", "right")]
    return np.asarray((sides[0] + sides[1]) / (2 * running[-1]))


_NEAR_CHANCE = 0.02
"""Share of log 2 within which a loss counts as chance."""
_CONSTANT = 1e-5
"""Standard deviation of rewards, in units of max(1, |mean|), that float32 arithmetic alone explains."""
_TIED = 1e-6
"""Margin, in units of the larger reward of the pair, that float32 arithmetic alone explains."""


@dataclass(frozen=True)
class CollapseVerdict:
    """Test that the rewards distinguish responses at all.

    Args:
        collapsed: True if they do not.
        reason: one sentence that starts with "collapsed:", or empty.
    """

    collapsed: bool
    reason: str


def detect_collapse(
    chosen: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    weight: Float[np.ndarray, " pairs"],
    nll: float,
) -> CollapseVerdict:
    """Collapse: a loss within 2 % of log 2 together with constant rewards or mostly tied pairs.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the others.
        weight: number of pairs that each counts for.
        nll: mean negative log-likelihood of the pairs, in nats.

    Example:
        >>> detect_collapse(*np.ones((3, 4)), nll=math.log(2)).collapsed
        True
    """
    if abs(nll - math.log(2)) > _NEAR_CHANCE * math.log(2):
        return CollapseVerdict(False, "")
    rewards = np.concatenate([chosen, rejected])
    spread = float(rewards.std())
    tied = np.abs(chosen - rejected) <= _TIED * np.maximum(np.abs(chosen), np.abs(rejected))
    share = float((weight * tied).sum() / weight.sum())
    if spread <= _CONSTANT * max(1.0, abs(float(rewards.mean()))):
        what = f"all {rewards.size:,} rewards are equal" + (f" but for noise of {spread:.1e}" if spread else "")
    elif share >= 0.5:
        what = f"{share:.0%} of pairs have tied rewards"
    else:
        return CollapseVerdict(False, "")
    return CollapseVerdict(True, f"collapsed: {what} and the loss is {nll:.4f} (chance is log 2 = 0.6931)")
