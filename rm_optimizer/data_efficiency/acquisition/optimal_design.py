"""Optimal designs of labels on the last layer: D- and V-optimality, one pair at a time.

Near its weights a reward model is linear in the features of its last layer: the margin of a pair is ``w'z`` with ``z``
the difference of the two features. Labels of pairs `z_i` give the weights the information

    A = prior I + sum_i p_i (1 - p_i) z_i z_i'        (logistic regression, Laplace)

with ``p_i`` the predicted preference. No label is needed to know it. Each step below adds one pair and updates what is
needed of every other one by products with two vectors, so a choice costs O(pairs hidden).
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import expit

from rm_optimizer.data_efficiency.acquisition.functions import AcquisitionFunction
from rm_optimizer.data_efficiency.acquisition.pool import Pool, blocks
from rm_optimizer.errors import ConfigError


class _LastLayerDesign(AcquisitionFunction):
    """Greedy design.

    Args:
        prior_precision: `prior` above, in units of the mean square of a coordinate of the differences; positive. It
            decides how soon directions that few pairs have are worth a label.
    """

    def __init__(self, prior_precision: float = 1.0) -> None:
        if not prior_precision > 0:
            raise ConfigError(f"prior_precision must be positive, got {prior_precision}")
        self.prior_precision = prior_precision

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Gain of the criterion by each pair's label alone."""
        return self._gains(LastLayerInformation(pool, pool.require_differences(self.name), self.prior_precision))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        information = LastLayerInformation(pool, pool.require_differences(self.name), self.prior_precision)
        return self._greedy(pool, k, generator, lambda: self._gains(information), information.add)

    @abstractmethod
    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        """Gain of the criterion by each pair."""


class DOptimal(_LastLayerDesign):
    """Pairs that shrink the volume of the weights' posterior most.

    The gain is ``log det(A + p(1-p) z z') - log det A = log(1 + p(1-p) z'A^-1 z)`` (Fedorov, 1972; for preferences Shen
    et al., 2025, arXiv:2502.04354, whose batches are chosen at once).
    """

    name = "d_optimal"

    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        return np.asarray(np.log1p(information.weights * information.variances))


class VOptimal(_LastLayerDesign):
    """Pairs that shrink the mean variance of the pool's margins most.

    With ``C`` the mean of ``z z'`` over the pool the gain is ``tr(C A^-1) - tr(C (A + p(1-p) z z')^-1) = p(1-p) z'A^-1
    C A^-1 z / (1 + p(1-p) z'A^-1 z)``.
    """

    name = "v_optimal"

    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        weights = information.weights
        return np.asarray(weights * information.reductions / (1 + weights * information.variances))


class LastLayerInformation:
    """Information matrix of the labels so far, and what each pair of the pool would add.

    Args:
        pool: the pairs; those that are labeled are in the matrix from the start.
        differences: their differences of features.
        prior_precision: as in `DOptimal`.

    Attributes:
        weights: ``p (1 - p)`` of each pair, with the members' mean margin.
        variances: ``z'A^-1 z``, the posterior variance of each pair's margin.
        reductions: ``z'A^-1 C A^-1 z``.
    """

    def __init__(
        self, pool: Pool, differences: Float[np.ndarray, "pairs hidden"], prior_precision: float = 1.0
    ) -> None:
        self._differences = differences
        chances = expit(pool.margins.mean(axis=0))
        self.weights = chances * (1 - chances)
        hidden = differences.shape[1]
        moments, fisher = np.zeros((hidden, hidden)), np.zeros((hidden, hidden))
        for start, block in blocks(differences):
            rows = np.asarray(block, dtype=np.float64)
            known = pool.is_labeled[start : start + len(rows)]
            moments += rows.T @ rows / len(differences)
            fisher += (rows[known] * self.weights[start : start + len(rows)][known, None]).T @ rows[known]
        self._moments = moments
        prior = prior_precision * max(float(np.trace(moments)) / hidden, np.finfo(np.float64).tiny)
        self._covariance = np.linalg.inv(fisher + prior * np.eye(hidden))
        reduction = self._covariance @ moments @ self._covariance
        self.variances, self.reductions = np.zeros(len(differences)), np.zeros(len(differences))
        for start, block in blocks(differences):
            rows = np.asarray(block, dtype=np.float64)
            self.variances[start : start + len(rows)] = np.einsum("nd,nd->n", rows @ self._covariance, rows)
            self.reductions[start : start + len(rows)] = np.einsum("nd,nd->n", rows @ reduction, rows)

    def add(self, position: int) -> None:
        """Count the pair's label: ``A += p(1-p) z z'``, and update each pair's variance and reduction (rank one).

        With ``u = A^-1 z``, ``g = A^-1 C u`` and ``c = p(1-p) / (1 + p(1-p) z'u)``, Sherman and Morrison's
        ``A^-1 - c u u'`` in place of ``A^-1`` takes ``c (z_i'u)^2`` off the variance of pair i, and
        ``2 c (z_i'u)(z_i'g) - c^2 (u'Cu) (z_i'u)^2`` off its reduction.
        """
        difference = np.asarray(self._differences[position], dtype=np.float64)
        u = self._covariance @ difference
        g = self._covariance @ (self._moments @ u)
        weight = self.weights[position]
        c = weight / (1 + weight * float(difference @ u))
        spread = float(u @ self._moments @ u)
        directions = np.stack([u, g], axis=1).astype(self._differences.dtype)
        for start, block in blocks(self._differences):
            along_u, along_g = np.asarray(block @ directions, dtype=np.float64).T
            self.variances[start : start + len(block)] -= c * along_u**2
            self.reductions[start : start + len(block)] -= 2 * c * along_u * along_g - c**2 * spread * along_u**2
        self._covariance -= c * np.outer(u, u)
