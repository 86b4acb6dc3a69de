"""Effects of one trained arm against another over the same prompts and seeds, their verdicts, and the tests' power."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import expit, log_expit
from scipy.stats import ncf
from scipy.stats import t as student_t

from rm_optimizer.core.metrics.calibration import NUM_BINS, equal_width_bins, fold
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, crossed_mean, with_honest_width

Score = Literal["accuracy", "nll", "brier", "ece"]
SCORES: tuple[Score, ...] = ("accuracy", "nll", "brier", "ece")
"""Scores that arms are compared by, in the order of `_scores`."""
Verdict = Literal["confirmed", "refuted", "undecided"]


def paired_effect(
    better: Float[np.ndarray, "seeds pairs"],
    worse: Float[np.ndarray, "seeds pairs"] | None,
    prompts: Sequence[str],
    score: Score,
    offset: Float[np.ndarray, " seeds"] | None = None,
    *,
    label: Float[np.ndarray, " pairs"] | None = None,
    weight: Float[np.ndarray, " pairs"] | None = None,
    num_bootstrap: int = 0,
) -> Estimate:
    """Mean over seeds of `worse`'s score less `better`'s (accuracy: the other way round), paired throughout.

    The variance of the prompts is the jackknife's over prompts of the mean over seeds, that of the seeds the variance
    between their own effects; see `crossed_mean`. One seed has no variance: its interval, if there is to be one, is of
    these very models over prompts.

    Args:
        better: margins of the arm that ought to be better, times beta.
        worse: margins of the other arm; None estimates the score of `better` itself.
        prompts: prompt of each pair.
        score: compared metric.
        offset: added to each seed's effect, and known exactly given the seed.
        label: probability that the chosen response is the better one, in [0, 1]; None is 1.
        weight: number of pairs that each counts for, positive; None is 1.
        num_bootstrap: resamples of prompts for the interval of one seed; 0 gives it none.
    """
    sign = 1.0 if worse is None or score == "accuracy" else -1.0
    arms = [better] if worse is None else [better, worse]
    ones = np.ones(len(prompts))
    label, weight = ones if label is None else label, ones if weight is None else weight
    columns = np.stack([[_terms(margin, label, weight) for margin in arm] for arm in arms])
    num_arms, num_seeds, _, width = columns.shape
    sums = cluster_totals(columns.transpose(2, 0, 1, 3).reshape(len(prompts), -1), prompts)

    def seed_effects(totals: np.ndarray) -> np.ndarray:
        values = _scores(totals.reshape(*totals.shape[:-1], num_arms, num_seeds, width))[..., SCORES.index(score)]
        return np.asarray(sign * (values[..., 0, :] - (values[..., 1, :] if worse is not None else 0.0)))

    def mean_effect(totals: np.ndarray) -> np.ndarray:
        return np.asarray(seed_effects(totals).mean(axis=-1, keepdims=True))

    if num_seeds == 1 and num_bootstrap:
        if worse is not None and np.array_equal(better, worse):
            return Estimate(0.0, 0.0, len(sums), 0.0, 0.0)
        estimate = cluster_bootstrap(sums, mean_effect, num_bootstrap=num_bootstrap, seed=0)[0]
        bounds = None if score == "nll" else (0.0 if worse is None else -1.0, 1.0)
        return with_honest_width(estimate, sums[:, width - 1], bounds=bounds)
    prompt_error = cluster_bootstrap(sums, mean_effect, num_bootstrap=0, seed=0)[0].standard_error
    per_seed = seed_effects(sums.sum(axis=0)) + (0.0 if offset is None else offset)
    return crossed_mean(per_seed, prompt_error or 0.0, len(sums))


def verdict(estimate: Estimate, threshold: float) -> Verdict:
    """Confirmed with the whole interval above the threshold, refuted with none of it above, else undecided."""
    if estimate.low is not None and estimate.low > threshold:
        return "confirmed"
    if estimate.high is not None and estimate.high <= threshold:
        return "refuted"
    return "undecided"


def both(first: Verdict, second: Verdict) -> Verdict:
    """Verdict on a hypothesis of two parts."""
    if "refuted" in (first, second):
        return "refuted"
    return "confirmed" if first == second == "confirmed" else "undecided"


def holm_adjusted(p_values: Float[np.ndarray, " tests"]) -> Float[np.ndarray, " tests"]:
    """P-values that keep the family's error rate: rejecting those below `alpha` errs with probability `alpha` at most.

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


def power(effect: float, standard_error: float, freedom: float) -> float:
    """Probability that the two-sided 95 % Student interval of a paired comparison excludes 0.

    `P(T^2 > t^2)` with `T^2` noncentral F of 1 and `freedom` degrees of freedom and noncentrality `(effect /
    standard_error)^2` (Cohen, 1988, chapter 2). Over n paired seeds the standard error is the differences' deviation
    over `sqrt(n)`, with n - 1 degrees of freedom.

    Args:
        effect: true difference.
        standard_error: of its estimate, positive.
        freedom: degrees of freedom of the standard error.
    """
    if effect == 0:
        return 1 - CONFIDENCE
    critical = float(student_t.ppf(0.5 + CONFIDENCE / 2, freedom))
    return float(ncf.sf(critical**2, 1, freedom, (effect / standard_error) ** 2))


def detectable_effect(standard_error: float, freedom: float, *, wanted: float = 0.8) -> float:
    """Smallest true difference that a paired comparison finds with probability `wanted`.

    Args:
        standard_error: of the estimated difference, positive.
        freedom: degrees of freedom of the standard error.
        wanted: power, above 0.05 and below 1.
    """
    highest = 2.0
    while power(highest, 1.0, freedom) < wanted:
        highest *= 2
    return standard_error * float(brentq(lambda shift: power(shift, 1.0, freedom) - wanted, 0.0, highest))


def _scores(totals: np.ndarray) -> np.ndarray:
    """Accuracy, NLL, Brier score and ECE from totals over pairs; NaN where no pair counts."""
    ece = np.abs(totals[..., 3:-2]).sum(axis=-1)
    counts = totals[..., -2:]
    sums = np.stack([totals[..., 0], totals[..., 1], totals[..., 2], ece], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / counts[..., [0, 1, 1, 1]])


def _terms(margin: np.ndarray, label: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Each pair's part of the totals: accuracy, NLL, Brier score, calibration gap in its bin, and both counts."""
    folded = fold(margin, label, weight)
    gaps = np.zeros((len(margin), NUM_BINS))
    gaps[np.arange(len(margin)), equal_width_bins(folded.confidence)] = folded.confidence - folded.outcome
    decided, chance = (label != 0.5).astype(float), expit(margin)
    means = [
        decided * (0.5 + 0.5 * np.sign(label - 0.5) * np.sign(margin)),
        -label * log_expit(margin) - (1 - label) * log_expit(-margin),
        label * (1 - chance) ** 2 + (1 - label) * chance**2,
    ]
    counts = np.stack([decided, np.ones_like(margin)], axis=1)
    return np.asarray(weight[:, None] * np.concatenate([np.stack(means, axis=1), gaps, counts], axis=1))
