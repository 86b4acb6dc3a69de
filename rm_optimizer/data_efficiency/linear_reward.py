"""A Bradley-Terry model that is linear in fixed features, fitted exactly, with the Laplace posterior of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import expit, log_expit

_MOST_STEPS = 100
_DECREASE = 1e-10
"""Newton decrement per pair at which the fit ends."""


@dataclass(frozen=True)
class LinearReward:
    """Weights of a linear reward, and their precision given the labels.

    Args:
        weights: reward for one unit of each feature.
        factor: lower Cholesky factor of the Hessian of the penalized log-likelihood at `weights`.
    """

    weights: Float[np.ndarray, " hidden"]
    factor: Float[np.ndarray, "hidden hidden"]

    def margins(self, differences: Float[np.ndarray, "pairs hidden"]) -> Float[np.ndarray, " pairs"]:
        """Margins of pairs from their feature differences."""
        return np.asarray(differences @ self.weights)

    def sampled_margins(
        self, differences: Float[np.ndarray, "pairs hidden"], num_members: int, generator: np.random.Generator
    ) -> Float[np.ndarray, "members pairs"]:
        """Margins by members drawn from the Laplace posterior ``N(weights, (factor factor')^-1)``."""
        noise = generator.standard_normal((len(self.weights), num_members))
        members = self.weights[:, None] + solve_triangular(self.factor, noise, lower=True, trans="T")
        return np.asarray((differences @ members).T)


def fit_linear_reward(
    differences: Float[np.ndarray, "pairs hidden"], label: Float[np.ndarray, " pairs"], *, ridge: float
) -> LinearReward:
    """Minimize ``-sum_i [y_i log p_i + (1 - y_i) log(1 - p_i)] + ridge/2 |w|^2`` with ``p_i = sigmoid(w'z_i)``.

    Newton's method with step halving. Without halving, a fit to few labels diverges, which makes the random baseline
    look bad and every other rule good.

    Args:
        differences: features of the first response less those of the second.
        label: probability that the first response is better, in [0, 1].
        ridge: precision of the prior, positive.
    """
    weights = np.zeros(differences.shape[1])

    def objective(at: np.ndarray) -> float:
        margins = differences @ at
        terms = label * log_expit(margins) + (1 - label) * log_expit(-margins)
        return float(ridge / 2 * at @ at - terms.sum())

    value = objective(weights)
    for _ in range(_MOST_STEPS):
        chances = expit(differences @ weights)
        gradient = differences.T @ (chances - label) + ridge * weights
        factor = np.linalg.cholesky(_hessian(differences, chances, ridge))
        step = cho_solve((factor, True), gradient)
        if float(gradient @ step) < _DECREASE * max(len(label), 1):
            break
        size = 1.0
        while (lower := objective(weights - size * step)) > value:
            size /= 2
        weights, value = weights - size * step, lower
    chances = expit(differences @ weights)
    return LinearReward(weights, cho_factor(_hessian(differences, chances, ridge), lower=True)[0])


def _hessian(differences: np.ndarray, chances: np.ndarray, ridge: float) -> np.ndarray:
    curved = differences * (chances * (1 - chances))[:, None]
    return np.asarray(differences.T @ curved + ridge * np.eye(differences.shape[1]))
