"""Acquisition functions that read features of the last layer, and the table of all rules.

The coreset and BADGE choose pairs that differ from each other. D- and V-optimality are optimal experimental designs,
one pair at a time. A reward model is linear in the features of its last layer: the margin of a pair is ``w'z`` with
``z`` the difference of the two responses' features. The information about the weights from the labels of pairs `z_i` is

    A = prior I + sum_i p_i (1 - p_i) z_i z_i'        (logistic regression, Laplace)

with ``p_i`` the predicted preference. It does not depend on the labels. Each step below adds one pair and updates the
values of all other pairs by products with two vectors, so a choice costs O(pairs hidden).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import expit

from rm_optimizer.data_efficiency.acquisition import (
    BALD,
    AcquisitionFunction,
    EntropySampling,
    LargeGap,
    LengthStratified,
    MarginSampling,
    RandomSampling,
    StochasticBALD,
    UncertaintySampling,
    are_equal,
)
from rm_optimizer.data_efficiency.pool import Pool, blocks
from rm_optimizer.errors import require_known
from rm_optimizer.schema.checks import require


class Coreset(AcquisitionFunction):
    """Pairs that cover the pool: each next pair is farthest from labeled and chosen ones (Sener and Savarese, 2018).

    A pair with its responses exchanged is the same point, so the smaller of the two distances counts.
    """

    name = "coreset"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Distance of the pair's feature difference from the nearest labeled one.

        It is the norm of the difference if no pair is labeled.
        """
        differences = pool.require_differences(self.name)
        squares = _square_norms(differences)
        nearest, labeled = squares.copy(), np.flatnonzero(pool.is_labeled)
        for _, some in blocks(labeled, 1024):
            for start, block in blocks(differences):
                products = np.abs(np.asarray(block @ differences[some].T, dtype=np.float64))
                own = nearest[start : start + len(block)]
                apart = (squares[some] - 2 * products).min(axis=1) + squares[start : start + len(block)]
                np.minimum(own, np.maximum(apart, 0.0), out=own)
        return np.asarray(np.sqrt(nearest))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        differences = pool.require_differences(self.name)
        squares, nearest = _square_norms(differences), self.scores(pool) ** 2

        def cover(best: int) -> None:
            np.minimum(nearest, _square_distances(differences, squares, best, up_to_sign=True), out=nearest)

        return self._greedy(pool, k, generator, lambda: nearest, cover)


class BADGE(AcquisitionFunction):
    """Pairs whose gradients are long and have different directions (Ash et al., 2020, arXiv:1906.03671).

    With the predicted preference as its label, a pair's gradient of the last layer is ``-min(p, 1-p) sign(margin) z``.
    The batch is drawn by k-means++. The first pair has the longest gradient. Each next pair is drawn with a probability
    proportional to the squared distance of its gradient from the nearest chosen one, or from zero if that is nearer.
    The paper does not count zero. It makes pairs rare whose answer the model is sure of.
    """

    name = "badge"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Norm of the gradient."""
        return np.asarray(np.sqrt(_square_norms(pool.require_differences(self.name))) * np.abs(_residuals(pool)))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        differences, factors = pool.require_differences(self.name), _residuals(pool)
        squares = _square_norms(differences) * factors**2
        nearest, is_taken = squares.copy(), pool.is_labeled.copy()
        chosen: list[int] = []
        for _ in range(k):
            left = np.where(is_taken, 0.0, nearest)
            if not chosen:
                longest = np.where(is_taken, -1.0, squares)
                first = np.flatnonzero(longest == longest.max())
                best = int(first[0] if len(first) == 1 else generator.choice(first))
            elif left.sum() > 0:
                best = int(generator.choice(len(left), p=left / left.sum()))
            else:  # every remaining gradient equals a chosen one
                best = int(generator.choice(np.flatnonzero(~is_taken)))
            is_taken[best] = True
            chosen.append(best)
            nearest = np.minimum(nearest, _square_distances(differences, squares, best, factors))
            if len(chosen) == 1 and are_equal(squares[pool.unlabeled]) and are_equal(nearest, float(squares.max())):
                self._warn_of_chance()
        return np.array(chosen)


def _residuals(pool: Pool) -> Float[np.ndarray, " pairs"]:
    """Derivative of the loss with respect to the margin if the predicted preference is the label."""
    margins = pool.margins.mean(axis=0)
    return np.asarray(-np.where(margins >= 0, 1.0, -1.0) * expit(-np.abs(margins)))


def _square_norms(rows: Float[np.ndarray, "pairs hidden"]) -> Float[np.ndarray, " pairs"]:
    return np.concatenate([np.einsum("nd,nd->n", block, block, dtype=np.float64) for _, block in blocks(rows)])


def _square_distances(
    rows: Float[np.ndarray, "pairs hidden"],
    squares: Float[np.ndarray, " pairs"],
    position: int,
    factors: Float[np.ndarray, " pairs"] | None = None,
    *,
    up_to_sign: bool = False,
) -> Float[np.ndarray, " pairs"]:
    """Squared distances of the rows, multiplied by their factors, from the row at a position.

    Args:
        rows: one for each pair.
        squares: squared norms of the rows multiplied by their factors.
        position: position of the row to compare with.
        factors: factor of each row; None is 1.
        up_to_sign: True takes the smaller of the distances from the row and from its negative.
    """
    products = np.concatenate([np.asarray(block @ rows[position], dtype=np.float64) for _, block in blocks(rows)])
    if factors is not None:
        products *= factors * factors[position]
    if up_to_sign:
        products = np.abs(products)
    return np.asarray(np.maximum(squares + squares[position] - 2 * products, 0.0))


class _LastLayerDesign(AcquisitionFunction):
    """Greedy choice of pairs by an optimality criterion.

    Args:
        prior_precision: `prior` above, in units of the mean square of a coordinate of the differences; positive. With
            a smaller one, directions that few pairs have are labeled earlier.
    """

    def __init__(self, prior_precision: float = 1.0) -> None:
        require(prior_precision > 0, "prior_precision", "be positive", prior_precision)
        self.prior_precision = prior_precision

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Gain in the criterion from each pair's label alone."""
        return self._gains(self._information(pool))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        information = self._information(pool)
        return self._greedy(pool, k, generator, lambda: self._gains(information), information.add)

    def _information(self, pool: Pool) -> LastLayerInformation:
        return LastLayerInformation(pool, pool.require_differences(self.name), self.prior_precision)

    @abstractmethod
    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        """Gain in the criterion from each pair."""


class DOptimal(_LastLayerDesign):
    """Pairs that reduce the volume of the weights' posterior most.

    The gain is ``log det(A + p(1-p) z z') - log det A = log(1 + p(1-p) z'A^-1 z)`` (Fedorov, 1972; for preferences Shen
    et al., 2025, arXiv:2502.04354, whose batches are chosen at once).
    """

    name = "d_optimal"

    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        return np.asarray(np.log1p(information.weights * information.variances))


class VOptimal(_LastLayerDesign):
    """Pairs that reduce the mean variance of the pool's margins most.

    With ``C`` the mean of ``z z'`` over the pool the gain is ``tr(C A^-1) - tr(C (A + p(1-p) z z')^-1) = p(1-p) z'A^-1
    C A^-1 z / (1 + p(1-p) z'A^-1 z)``.
    """

    name = "v_optimal"

    def _gains(self, information: LastLayerInformation) -> Float[np.ndarray, " pairs"]:
        weights = information.weights
        return np.asarray(weights * information.reductions / (1 + weights * information.variances))


class BoundaryOptimal(VOptimal):
    """Pairs that reduce the pool's expected loss of accuracy most: V-optimality near the decision boundary.

    Let the posterior of a margin t be normal with mean m and variance v. Predicting the sign of m loses ``|tanh(t/2)|``
    of accuracy if t has the other sign. With ``tanh(t/2) ~ t/2`` the expected loss is ``(sqrt(v) phi(m/sqrt(v)) -
    |m| Phi(-|m|/sqrt(v))) / 2``. Its derivative with respect to v is ``phi(m/sqrt(v)) / (4 sqrt(v))``, a quarter of the
    margin's density at zero. So to first order V-optimality gives the value of a label if ``C`` is the mean of
    ``z z'`` weighted by these densities. The densities are computed from the labels known before the batch. Without
    labels, the choice equals V-optimality's.
    """

    name = "boundary_optimal"

    def _information(self, pool: Pool) -> LastLayerInformation:
        information = super()._information(pool)
        information.weigh_moments(density_at_zero(pool.margins.mean(axis=0), information.variances))
        return information


def density_at_zero(
    means: Float[np.ndarray, " pairs"], variances: Float[np.ndarray, " pairs"]
) -> Float[np.ndarray, " pairs"]:
    """Density at 0 of normal margins, divided by the largest one.

    It is 0 if the variance is 0.

    Args:
        means: mean of each margin.
        variances: variance of each margin, not negative.

    Example:
        >>> density_at_zero(np.array([0.0, 0.0]), np.array([1.0, 4.0])).tolist()
        [1.0, 0.5]
    """
    is_known = variances <= 1e-12 * variances.max()
    spread = np.where(is_known, 1.0, variances)
    logs = np.where(is_known, -np.inf, -(means**2) / (2 * spread) - np.log(spread) / 2)
    largest = logs.max()
    return np.asarray(np.exp(logs - largest)) if np.isfinite(largest) else np.ones(len(logs))


class LastLayerInformation:
    """Information matrix of the labels so far, and the effect of each pair of the pool.

    Args:
        pool: the pairs; labeled ones are in the matrix from the start.
        differences: feature differences of the pairs.
        prior_precision: prior precision, as in `DOptimal`.

    Attributes:
        weights: ``p (1 - p)`` of each pair, with the members' mean margin.
        variances: ``z'A^-1 z``, the posterior variance of each pair's margin.
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
        prior = prior_precision * max(float(np.trace(moments)) / hidden, np.finfo(np.float64).tiny)
        self._covariance = np.linalg.inv(fisher + prior * np.eye(hidden))
        self.variances = self._forms(self._covariance)
        self._moments = moments

    @cached_property
    def reductions(self) -> Float[np.ndarray, " pairs"]:
        """``z'A^-1 C A^-1 z`` of each pair, with `C` the mean of ``z z'`` over the pool.

        It is computed when first read.
        """
        return self._forms(self._covariance @ self._moments @ self._covariance)

    def weigh_moments(self, weights: Float[np.ndarray, " pairs"]) -> None:
        """Replace `C` by the weighted mean of ``z z'``.

        Call it before `reductions` are read.

        Args:
            weights: weight of each pair, not negative and not all 0.
        """
        moments = np.zeros_like(self._moments)
        for start, block in blocks(self._differences):
            rows = np.asarray(block, dtype=np.float64)
            moments += (rows * weights[start : start + len(rows), None]).T @ rows
        self._moments = moments / weights.sum()

    def _forms(self, matrix: Float[np.ndarray, "hidden hidden"]) -> Float[np.ndarray, " pairs"]:
        """``z' matrix z`` of each pair."""
        found = np.zeros(len(self._differences))
        for start, block in blocks(self._differences):
            rows = np.asarray(block, dtype=np.float64)
            found[start : start + len(rows)] = np.einsum("nd,nd->n", rows @ matrix, rows)
        return found

    def add(self, position: int) -> None:
        """Add the pair's label, ``A += p(1-p) z z'``, and update each pair's variance and reduction (rank one).

        Let ``u = A^-1 z``, ``g = A^-1 C u`` and ``c = p(1-p) / (1 + p(1-p) z'u)``. By Sherman and Morrison ``A^-1``
        becomes ``A^-1 - c u u'``. So the variance of pair i falls by ``c (z_i'u)^2``, and its reduction by
        ``2 c (z_i'u)(z_i'g) - c^2 (u'Cu) (z_i'u)^2``.
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
            if "reductions" in vars(self):
                self.reductions[start : start + len(block)] -= 2 * c * along_u * along_g - c**2 * spread * along_u**2
        self._covariance -= c * np.outer(u, u)


RULES: dict[str, Callable[[], AcquisitionFunction]] = {
    rule.name: rule
    for rule in (
        BoundaryOptimal,
        VOptimal,
        DOptimal,
        Coreset,
        BADGE,
        BALD,
        StochasticBALD,
        UncertaintySampling,
        EntropySampling,
        MarginSampling,
        LargeGap,
        LengthStratified,
        RandomSampling,
    )
}
"""Rules, the default first."""


def acquisition_function(name: str) -> AcquisitionFunction:
    """The rule of this name, with its defaults.

    Raises:
        ConfigError: if the name is unknown.
    """
    require_known("rule", name, RULES)
    return RULES[name]()
