"""Power laws of learning curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

_EXPONENTS = np.linspace(0.02, 3.0, 150)


@dataclass(frozen=True)
class PowerLaws:
    """Rising laws ``level - scale n^-exponent``, one for each curve; NaN if no rising law fits.

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
        """Numbers of pairs at which the laws have these values; infinite if they never do."""
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
