"""Calibration of P(chosen > rejected) = sigmoid(beta * margin).

A pair has no "positive" side, so it counts from both sides: `(p, y)` and `(1 - p, 1 - y)`. Calibration on this
symmetrized set equals calibration on the *folded* pairs, which take the side that the model prefers. A folded pair has
a confidence in [0.5, 1] and the probability that this side was the better one. The mirrored half has the same gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit, log_expit, logit

from rm_optimizer.core.metrics.intervals import wilson_interval

NUM_BINS = 10
"""Bins of [0.5, 1]: as many as 20 over [0, 1]."""

_NOISE_DRAWS = 200
_DRAWS_AT_ONCE = 4_000_000
_SHARES = np.arange(0.0, 0.451, 0.01)
_SHARPNESS = np.exp(np.arange(-0.5, 2.51, 0.1))
_QUANTILES = 4000
"""Number of quantiles of the margins that the estimate uses."""
_SIGNIFICANT = 2.706
"""Upper 5 % point of the likelihood ratio; the share cannot be negative, so half of it is 0 and half chi-squared."""


@dataclass(frozen=True)
class FoldedPairs:
    """Pairs seen from the side the model prefers.

    Args:
        confidence: probability the model gives the side it prefers, in [0.5, 1].
        outcome: probability by the label that this side is the better one, in [0, 1]; 0.5 where the model ties.
        weight: number of pairs that each counts for.
    """

    confidence: Float[np.ndarray, " pairs"]
    outcome: Float[np.ndarray, " pairs"]
    weight: Float[np.ndarray, " pairs"]


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs of similar confidence.

    Args:
        low: lower edge of the bin, a probability.
        high: upper edge.
        num_pairs: pairs in the bin.
        mean_confidence: mean predicted probability of the preferred side.
        frequency: share of pairs in which that side was the better one.
        frequency_low: lower end of the frequency's 95 % Wilson interval, taking pairs as independent.
        frequency_high: upper end.
    """

    low: float
    high: float
    num_pairs: int
    mean_confidence: float
    frequency: float
    frequency_low: float
    frequency_high: float


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature that would calibrate the rewards, or the reason why none would.

    Args:
        temperature: T of sigmoid(beta * margin / T) with the least NLL; above 1 the model is over-confident.
        nll: mean NLL at that temperature, in nats.
        reason: reason why no finite positive temperature is best; None if one is.
    """

    temperature: float | None
    nll: float | None
    reason: str | None = None


def fold(
    logit: Float[np.ndarray, " pairs"], label: Float[np.ndarray, " pairs"], weight: Float[np.ndarray, " pairs"]
) -> FoldedPairs:
    """The pairs seen from the side the model prefers.

    Args:
        logit: beta times the reward difference.
        label: probability that `chosen` is the better one.
        weight: number of pairs that each counts for.
    """
    outcome = np.where(logit > 0, label, np.where(logit < 0, 1 - label, 0.5))
    return FoldedPairs(expit(np.abs(logit)), outcome, weight)


def pair_scores(
    logit: Float[np.ndarray, " pairs"], label: Float[np.ndarray, " pairs"]
) -> dict[str, Float[np.ndarray, " pairs"]]:
    """Accuracy, NLL and Brier score of each pair; the accuracy of a pair labeled 0.5, which has none, is 0.

    Args:
        logit: beta times the reward difference.
        label: probability that `chosen` is the better one.
    """
    chance = expit(logit)
    return {
        "accuracy": (label != 0.5) * (0.5 + 0.5 * np.sign(label - 0.5) * np.sign(logit)),
        "nll": -label * log_expit(logit) - (1 - label) * log_expit(-logit),
        "brier": label * (1 - chance) ** 2 + (1 - label) * chance**2,
    }


def equal_width_bins(confidence: Float[np.ndarray, " pairs"]) -> Int[np.ndarray, " pairs"]:
    """Bin of each confidence when [0.5, 1] is cut into `NUM_BINS` equal parts; an edge belongs to the upper part."""
    return np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def equal_mass_bins(
    confidence: Float[np.ndarray, " pairs"], weight: Float[np.ndarray, " pairs"]
) -> Int[np.ndarray, " pairs"]:
    """Bin of each confidence when `NUM_BINS` bins hold as equal a weight as ties allow; equal values share a bin."""
    shares = np.arange(1, NUM_BINS) / NUM_BINS
    edges = np.quantile(confidence, shares, weights=weight, method="inverted_cdf")
    return np.searchsorted(edges, confidence, side="left").astype(np.int64)


def expected_calibration_error(pairs: FoldedPairs, bins: Int[np.ndarray, " pairs"]) -> float:
    """Symmetrized expected calibration error: mean over bins of |confidence - frequency|, by weight.

    `sum_b |sum_{i in b} w_i (q_i - t_i)| / sum_i w_i` (Naeini et al., 2015, doi:10.1609/aaai.v29i1.9602, on both sides
    of every pair).

    Args:
        pairs: the folded pairs.
        bins: bin of each pair, in [0, `NUM_BINS`).
    """
    gaps = np.bincount(bins, pairs.weight * (pairs.confidence - pairs.outcome), minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / pairs.weight.sum())


def calibration_noise_floor(pairs: FoldedPairs, bins: Int[np.ndarray, " pairs"], *, seed: int) -> float:
    """Expected calibration error of a perfectly calibrated model with the same confidences.

    It is simulated: outcomes are drawn from the confidences, one draw for each pair independent of its weight. A pair
    that the model ties has an outcome of 0.5 without noise. A measured error near this floor is no evidence against
    calibration (cf. Vaicenavicius et al., 2019, arXiv:1902.06977). Soft labels are less noisy than single votes, so
    that the floor is an upper bound for them.

    Args:
        pairs: the folded pairs; outcomes are not used.
        bins: bin of each pair.
        seed: seed of the simulation.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(bins, kind="stable")
    q = pairs.confidence[order]
    w = np.where(q > 0.5, pairs.weight[order], 0.0)
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    rows_at_once = max(1, _DRAWS_AT_ONCE // len(q))
    errors = []
    for start in range(0, _NOISE_DRAWS, rows_at_once):
        rows = min(rows_at_once, _NOISE_DRAWS - start)
        outcomes = rng.random((rows, len(q))) < q
        gaps = np.add.reduceat(w * (q - outcomes), starts, axis=1)
        errors.append(np.abs(gaps).sum(axis=1))
    return float(np.concatenate(errors).mean() / pairs.weight.sum())


def reliability_curve(pairs: FoldedPairs) -> tuple[ReliabilityBin, ...]:
    """The non-empty equal-width bins from low to high confidence, with Wilson intervals of the frequency.

    With weights the interval's sample size is Kish's, `(sum w)^2 / sum w^2`.
    """
    bins, curve = equal_width_bins(pairs.confidence), []
    for index in np.unique(bins).tolist():
        inside = bins == index
        w = pairs.weight[inside]
        frequency = float(np.clip((w * pairs.outcome[inside]).sum() / w.sum(), 0.0, 1.0))
        low, high = wilson_interval(frequency, float(w.sum() ** 2 / (w**2).sum()))
        curve.append(
            ReliabilityBin(
                low=0.5 + index / (2 * NUM_BINS),
                high=0.5 + (index + 1) / (2 * NUM_BINS),
                num_pairs=int(inside.sum()),
                mean_confidence=float((w * pairs.confidence[inside]).sum() / w.sum()),
                frequency=frequency,
                frequency_low=low,
                frequency_high=high,
            )
        )
    return tuple(curve)


def fit_temperature(
    logit: Float[np.ndarray, " pairs"], label: Float[np.ndarray, " pairs"], weight: Float[np.ndarray, " pairs"]
) -> TemperatureFit:
    """The temperature that minimizes the NLL of sigmoid(logit / T) (Guo et al., 2017, arXiv:1706.04599, sec. 4.2).

    The NLL is convex in `a = 1 / T` with slope `mean w (sigmoid(a z) - y) z`, which rises with `a`. Where the slope at
    `a = 0` is not negative the best `a` is not positive; where the slope stays negative however large `a` gets, every
    pair is ranked as labeled and the best T is 0. Neither is a temperature, and the fit holds the reason instead.

    Args:
        logit: beta times the reward difference.
        label: probability that `chosen` is the better one.
        weight: number of pairs that each counts for.
    """
    from scipy.optimize import brentq  # takes a third of a second

    scale = float(np.abs(logit).max())
    if scale == 0:
        return TemperatureFit(None, None, "every margin is zero, so no temperature changes the probabilities")
    z = logit / scale
    total = weight.sum()
    contradicted = float((weight * np.abs(z) * (1 - np.where(z > 0, label, 1 - label))).sum() / total)
    if contradicted == 0:
        return TemperatureFit(None, None, "every pair is ranked as labeled, so ever lower temperatures fit better")

    def slope(inverse: float) -> float:
        return float((weight * (expit(inverse * z) - label) * z).sum() / total)

    if slope(0.0) >= 0:
        return TemperatureFit(None, None, "the margins do not agree with the labels, so no positive temperature fits")
    upper = 1.0
    while slope(upper) < 0:
        upper *= 4
    inverse = float(brentq(slope, 0.0, upper, xtol=1e-14 * upper, rtol=1e-12))
    scores = label * log_expit(inverse * z) + (1 - label) * log_expit(-inverse * z)
    return TemperatureFit(scale / inverse, float(-(weight * scores).sum() / total))


def flipped_labels(chances: Float[np.ndarray, " pairs"]) -> tuple[float, Float[np.ndarray, " pairs"]]:
    """Estimate which labels were flipped, from held-out probabilities of all labels.

    A label that was flipped with probability e has the probability ``(1 - 2 e) sigmoid(a m) + e`` with `m` the model's
    margin for it. Random flips make the model under-confident, which `a` corrects. Both numbers are maximum-likelihood
    estimates. If the likelihood is not significantly higher than with ``e = 0`` (a likelihood-ratio test at 5 %), no
    label counts as flipped: people disagree, and an improbable label need not be wrong.

    Args:
        chances: probability of each pair's label by a model that was not trained on it.

    Returns:
        The share of flipped labels, in [0, 0.45], and the probability of each label that it was flipped. Both are 0 if
        the labels are no noisier than people's preferences, as the model expects them.
    """
    margins = logit(np.clip(chances, 1e-12, 1 - 1e-12))
    num = min(len(margins), _QUANTILES)
    agreed = expit(np.multiply.outer(_SHARPNESS, np.quantile(margins, (np.arange(num) + 0.5) / num)))
    likelihood = np.array([np.log((1 - 2 * share) * agreed + share + 1e-300).mean(axis=1) for share in _SHARES])
    row, column = np.unravel_index(int(np.argmax(likelihood)), likelihood.shape)
    if 2 * len(margins) * (likelihood[row, column] - likelihood[0].max()) < _SIGNIFICANT:
        return 0.0, np.zeros(len(chances))
    share, found = float(_SHARES[row]), expit(_SHARPNESS[column] * margins)
    return share, share * (1 - found) / ((1 - 2 * share) * found + share)
