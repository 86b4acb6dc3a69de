"""Effects of one trained arm against another over the same prompts and seeds, their verdicts, and the tests' power."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import log_expit
from scipy.stats import ncf
from scipy.stats import t as student_t

from rm_optimizer.core.metrics.calibration import NUM_BINS, equal_width_bins, fold
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, crossed_mean

Score = Literal["accuracy", "nll", "ece"]
SCORES: tuple[Score, ...] = ("accuracy", "nll", "ece")
"""Scores that arms are compared by, in the order of `_scores`."""
Verdict = Literal["confirmed", "refuted", "undecided"]


def paired_effect(
    better: Float[np.ndarray, "seeds pairs"],
    worse: Float[np.ndarray, "seeds pairs"] | None,
    prompts: Sequence[str],
    score: Score,
    offset: Float[np.ndarray, " seeds"] | None = None,
) -> Estimate:
    """Mean over seeds of `worse`'s score less `better`'s (accuracy: the other way round), paired throughout.

    The variance of the prompts is the jackknife's over prompts of the mean over seeds, that of the seeds the variance
    between their own effects; see `crossed_mean`.

    Args:
        better: margins of the arm that ought to be better.
        worse: margins of the other arm; None estimates the score of `better` itself.
        prompts: prompt of each pair.
        score: compared metric.
        offset: added to each seed's effect, and known exactly given the seed.
    """
    sign = 1.0 if worse is None or score == "accuracy" else -1.0
    arms = [better] if worse is None else [better, worse]
    columns = np.stack([[_terms(margin) for margin in arm] for arm in arms])
    num_arms, num_seeds, _, width = columns.shape
    sums = cluster_totals(columns.transpose(2, 0, 1, 3).reshape(len(prompts), -1), prompts)

    def seed_effects(totals: np.ndarray) -> np.ndarray:
        values = _scores(totals.reshape(*totals.shape[:-1], num_arms, num_seeds, width))[..., SCORES.index(score)]
        return np.asarray(sign * (values[..., 0, :] - (values[..., 1, :] if worse is not None else 0.0)))

    def mean_effect(totals: np.ndarray) -> np.ndarray:
        return np.asarray(seed_effects(totals).mean(axis=-1, keepdims=True))

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
    """Accuracy, NLL and ECE from totals over pairs, whose last entry is the number of pairs."""
    ece = np.abs(totals[..., 2:-1]).sum(axis=-1, keepdims=True)
    return np.asarray(np.concatenate([totals[..., :2], ece], axis=-1) / totals[..., -1:])


def _terms(margin: np.ndarray) -> np.ndarray:
    """Each pair's part of the totals: half-credit accuracy, NLL, the calibration gap in its bin, and one."""
    folded = fold(margin, np.ones_like(margin), np.ones_like(margin))
    gaps = np.zeros((len(margin), NUM_BINS))
    gaps[np.arange(len(margin)), equal_width_bins(folded.confidence)] = folded.confidence - folded.outcome
    means = np.stack([0.5 + 0.5 * np.sign(margin), -log_expit(margin)], axis=1)
    return np.concatenate([means, gaps, np.ones((len(margin), 1))], axis=1)
