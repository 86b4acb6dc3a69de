"""Batches of pairs that differ from each other: the k-centre coreset and BADGE."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import expit

from rm_optimizer.data_efficiency.acquisition.functions import AcquisitionFunction, are_equal
from rm_optimizer.data_efficiency.acquisition.pool import Pool, blocks


class Coreset(AcquisitionFunction):
    """Pairs that cover the pool: each next pair is farthest from labeled and chosen ones (Sener and Savarese, 2018).

    A pair with its responses exchanged is the same point, so the smaller of the two distances counts.
    """

    name = "coreset"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Distance of the pair's feature difference from the nearest labeled one; its norm if no pair is labeled."""
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
    proportional to the squared distance of its gradient from the nearest chosen one.
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
