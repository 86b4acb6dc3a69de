"""Detection of responses unlike the reference data, at a given false-positive rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.linalg import cho_factor, cho_solve

from rm_optimizer.core.metrics.estimate import finite_array
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.orders import random_positions
from rm_optimizer.schema.checks import require


@dataclass(frozen=True)
class OODDetection(JsonRecord):
    """Responses compared with reference responses.

    Args:
        scores: distance of each response from the reference; larger is farther.
        is_ood: True if the score exceeds the threshold.
        threshold: largest score that counts as in distribution.
        false_positive_rate: largest probability that a response like the reference ones exceeds the threshold; None for
            a threshold that was not fitted.
    """

    scores: tuple[float, ...]
    is_ood: tuple[bool, ...]
    threshold: float
    false_positive_rate: float | None


def detection(
    scores: Float[np.ndarray, " responses"], threshold: float, false_positive_rate: float | None
) -> OODDetection:
    """Compare scores with a threshold, which was fitted for this rate."""
    flagged = tuple(bool(score > threshold) for score in scores)
    return OODDetection(tuple(scores.tolist()), flagged, threshold, false_positive_rate)


def conformal_threshold(scores: Float[np.ndarray, " reference"], false_positive_rate: float) -> float:
    """Threshold that a new score of the same kind exceeds with probability at most `false_positive_rate`.

    It is the `ceil((n + 1) (1 - rate))`-th smallest of n scores, which is exact in finite samples if the new score is
    exchangeable with them (Vovk et al., 2005, "Algorithmic Learning in a Random World").

    Args:
        scores: scores of reference responses that are used for no other fit.
        false_positive_rate: share of reference responses above the threshold, in (0, 1).

    Raises:
        ConfigError: if the rate is not in (0, 1).
        DataError: if there are too few scores for the rate.

    Example:
        >>> conformal_threshold(np.arange(19.0), 0.05)
        18.0
    """
    require(0 < false_positive_rate < 1, "false_positive_rate", "lie in (0, 1)", false_positive_rate)
    rank = math.ceil((len(scores) + 1) * (1 - false_positive_rate) - 1e-9)
    if rank > len(scores):
        needed = math.ceil(1 / false_positive_rate - 1e-9) - 1
        raise DataError(
            f"a false-positive rate of {false_positive_rate:g} needs at least {2 * needed} reference responses, half "
            f"of them for the threshold, got {2 * len(scores)}; give more, or a higher rate"
        )
    return float(np.sort(scores)[rank - 1])


def halves(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of two random halves: one for the fit, the other for the threshold."""
    first = random_positions(num_rows, num_rows // 2, [seed, num_rows])
    return first, np.setdiff1d(np.arange(num_rows), first)


class MahalanobisDetector:
    """Distance of a response's features from reference responses (Lee et al., 2018, arXiv:1807.03888).

    ``d(x) = sqrt(z' C^-1 z / hidden)`` with `z` the features standardized one by one and `C` their covariance, shrunk
    by the method of Ledoit and Wolf (2004, doi:10.1016/S0047-259X(03)00096-4). One half of the reference sets means,
    deviations and covariance, the other half the threshold.

    Args:
        reference: features of reference responses, shape (responses, hidden), from `core.model.features.features`.
        false_positive_rate: largest probability that a response like the reference ones is flagged.
        seed: seed of the halves.

    Raises:
        ConfigError: if the rate is not in (0, 1).
        DataError: if the features are not finite, or there are too few of them for the rate.
    """

    def __init__(self, reference: ArrayLike, *, false_positive_rate: float = 0.05, seed: int = 0) -> None:
        reference = finite_array(reference, "features", ["response", "feature"])
        fitted, held_out = halves(len(reference), seed)
        if len(fitted) < 2:
            raise DataError(f"expected at least 4 reference responses, got {len(reference)}; give more")
        self._mean, deviations = reference[fitted].mean(axis=0), reference[fitted].std(axis=0)
        self._scale = np.maximum(deviations, 1e-6 * deviations.max())
        if not deviations.max() > 0:
            raise DataError("all reference responses have equal features; give responses that differ")
        self._factor = cho_factor(shrunk_covariance((reference[fitted] - self._mean) / self._scale))
        self.false_positive_rate = false_positive_rate
        self.threshold = conformal_threshold(self.distances(reference[held_out]), false_positive_rate)

    def distances(self, features: ArrayLike) -> Float[np.ndarray, " responses"]:
        """Distances of responses by their features, shape (responses, hidden); about 1 for ones like the reference."""
        apart = (finite_array(features, "features", ["response", "feature"]) - self._mean) / self._scale
        squared = np.einsum("rh,hr->r", apart, cho_solve(self._factor, apart.T))
        return np.asarray(np.sqrt(np.maximum(squared, 0.0) / len(self._mean)))

    def detect(self, features: ArrayLike) -> OODDetection:
        """Compare the responses' distances with the threshold."""
        return detection(self.distances(features), self.threshold, self.false_positive_rate)


def shrunk_covariance(rows: Float[np.ndarray, "rows hidden"]) -> Float[np.ndarray, "hidden hidden"]:
    """Covariance shrunk towards a multiple of the identity by the share that minimizes the expected error.

    `(1 - s) S + s m I` with `S` the covariance, `m` its mean eigenvalue and `s` by Ledoit and Wolf (2004, Lemma 3.1).
    It is positive definite if the rows differ.
    """
    num_rows, hidden = rows.shape
    centered = rows - rows.mean(axis=0)
    covariance = centered.T @ centered / num_rows
    mean = float(np.trace(covariance)) / hidden
    spread = float((covariance**2).sum()) / hidden - mean**2
    fourth = float(((centered**2).sum(axis=1) ** 2).sum()) / num_rows
    error = (fourth - float((covariance**2).sum())) / (num_rows * hidden)
    share = 1.0 if spread <= 0 else min(max(error, 0.0), spread) / spread
    return np.asarray((1 - share) * covariance + max(share, 1e-12) * mean * np.eye(hidden))
