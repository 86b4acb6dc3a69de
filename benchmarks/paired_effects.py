"""Effects of one trained arm against another over the same prompts and seeds, and the verdict on them.

Two variances add up: that of the prompts (jackknife over prompts of the mean over seeds) and that of the seeds (between
the seeds' own effects). Three seeds are too few to resample, so the interval is Student's with Satterthwaite's degrees
of freedom. What prompts and seeds share is counted twice, so intervals are rather too wide than too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_expit
from scipy.stats import t as student

from rm_optimizer.core.metrics.calibration import NUM_BINS, equal_width_bins, fold
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, cluster_bootstrap

SCORED = ("accuracy", "nll", "ece")
"""What `scores` returns, in order."""


def scores(totals: np.ndarray) -> np.ndarray:
    """Accuracy, NLL and ECE from totals over pairs, whose last entry is the number of pairs."""
    ece = np.abs(totals[..., 2:-1]).sum(axis=-1, keepdims=True)
    return np.asarray(np.concatenate([totals[..., :2], ece], axis=-1) / totals[..., -1:])


def terms(margin: np.ndarray) -> np.ndarray:
    """What each pair adds to the totals: half-credit accuracy, NLL, the calibration gap in its bin, and one."""
    folded = fold(margin, np.ones_like(margin), np.ones_like(margin))
    gaps = np.zeros((len(margin), NUM_BINS))
    gaps[np.arange(len(margin)), equal_width_bins(folded.confidence)] = folded.confidence - folded.outcome
    means = np.stack([0.5 + 0.5 * np.sign(margin), -log_expit(margin)], axis=1)
    return np.concatenate([means, gaps, np.ones((len(margin), 1))], axis=1)


def effect(
    better: np.ndarray, worse: np.ndarray | None, prompts: Sequence[str], score: str, offset: np.ndarray | None = None
) -> Estimate:
    """Mean over seeds of `worse`'s score less `better`'s (accuracy: the other way round), paired throughout.

    Args:
        better: margins of the arm that ought to be better, (seeds, pairs).
        worse: margins of the other arm; None estimates the score of `better` itself.
        prompts: prompt of each pair.
        score: one of `SCORED`.
        offset: added to each seed's effect, and known exactly given the seed.
    """
    which = SCORED.index(score)
    sign = 1.0 if worse is None or score == "accuracy" else -1.0
    arms = [better] if worse is None else [better, worse]
    columns = np.stack([[terms(margin) for margin in arm] for arm in arms])
    num_arms, num_seeds, _, width = columns.shape
    cluster = np.unique(np.array(prompts), return_inverse=True)[1]
    sums = np.zeros((int(cluster.max()) + 1, num_arms * num_seeds * width))
    np.add.at(sums, cluster, columns.transpose(2, 0, 1, 3).reshape(len(cluster), -1))

    def seed_effects(totals: np.ndarray) -> np.ndarray:
        values = scores(totals.reshape(*totals.shape[:-1], num_arms, num_seeds, width))[..., which]
        return np.asarray(sign * (values[..., 0, :] - (values[..., 1, :] if worse is not None else 0.0)))

    def mean_effect(totals: np.ndarray) -> np.ndarray:
        return np.asarray(seed_effects(totals).mean(axis=-1, keepdims=True))

    prompt_error = cluster_bootstrap(sums, mean_effect, num_bootstrap=0, seed=0)[0].standard_error
    per_seed = seed_effects(sums.sum(axis=0)) + (0.0 if offset is None else offset)
    return crossed_estimate(per_seed, prompt_error or 0.0, len(sums))


def crossed_estimate(per_seed: np.ndarray, prompt_error: float, num_prompts: int) -> Estimate:
    """Mean over seeds with Student's 95 % interval, from the variances of seeds and of prompts.

    Degrees of freedom `(a + b)^2 / (a^2 / (seeds - 1) + b^2 / (prompts - 1))` with `a` the variance of the mean that
    seeds cause and `b` that prompts cause (Satterthwaite, 1946). One seed has no variance and gets no interval.
    """
    value, num_seeds = float(per_seed.mean()), len(per_seed)
    if num_seeds < 2:
        return Estimate(value, None, num_prompts)
    a, b = float(per_seed.var(ddof=1)) / num_seeds, prompt_error**2
    if a + b == 0:
        return Estimate(value, 0.0, num_prompts, value, value)
    others = b**2 / (num_prompts - 1) if num_prompts > 1 else 0.0
    freedom = (a + b) ** 2 / (a**2 / (num_seeds - 1) + others)
    half = float(student.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(a + b)
    return Estimate(value, math.sqrt(a + b), num_prompts, value - half, value + half)


def verdict(estimate: Estimate, threshold: float) -> str:
    """Confirmed with the whole interval above the threshold, refuted with none of it above, else undecided."""
    if estimate.low is not None and estimate.low > threshold:
        return "confirmed"
    if estimate.high is not None and estimate.high <= threshold:
        return "refuted"
    return "undecided"


def both(first: str, second: str) -> str:
    """The verdict on a hypothesis of two parts."""
    if "refuted" in (first, second):
        return "refuted"
    return "confirmed" if first == second == "confirmed" else "undecided"
