"""Extreme eigenpairs of a symmetric operator by Lanczos with full reorthogonalization.

The iteration builds an orthonormal basis `Q` of the Krylov space, every new vector orthogonalized twice against all
others, and solves `Q A Q^T` in float64 (Lanczos, 1950; Parlett, 1998, chapter 13). An eigenvalue lies within the
residual `r` of each computed value. A value has converged when its residual, which does not depend on other values, is
within the tolerance. The error bound is `r`, or for a converged value `4 r^2 / gap` (Theorem 11.7.1) if the gap to the
other computed values is resolved. An eigenvalue that is not found yet may lie within the gap. The factor 4 allows for
one that halves the gap and more.

A Krylov space contains only one vector of a repeated eigenvalue. When the space is exhausted, another one begins from a
random vector orthogonal to it. The iteration ends when a further space changes no wanted value. Until then copies can
be missed; `with_overlooked` searches for them. Of a matrix of low rank, 0 is repeated. If a wanted value is 0, the
first space is therefore exhausted, and further ones follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.operators.support import Support
from rm_optimizer.landscape.operators.vectors import RandomVectors, orthogonality_loss, unit
from rm_optimizer.landscape.solvers.krylov import KrylovState, extend
from rm_optimizer.schema.checks import require

End = Literal["largest", "smallest", "magnitude", "both"]
"""Wanted eigenvalues: from the top, from the bottom, by magnitude, or as many from the top as from the bottom."""
RANDOM_PART = 0.1
"""Length of the random part of a start from earlier vectors, whose sum has length 1."""
_RESOLVED = 10
"""Gap to the neighbors, in residuals, from which `4 r^2 / gap` bounds an error."""
_UNSEEN = 4
"""Share of a resolved gap that is relied on is one in so many: measured so that no bound of 17,088 values failed."""
FEWEST_SPARE = 4
"""Least number of vectors of a bounded basis in addition to the wanted ones."""
_KEPT_SHARE = 0.3
_NEGLIGIBLE = 1e-6
"""Share of the largest value; the tolerance of smaller values is relative to this share, and they may be 0."""
_EPSILONS = 256
"""Largest error of eigenvalues by rounding of products, in machine epsilons of the largest: measured, not proven.

For small reward models in float32 it was usually 3 and at worst 82, with every product method.
"""


def rounding(dtype: torch.dtype, values: Float[np.ndarray, " values"]) -> float:
    """Bound on each eigenvalue's error by the rounding of products in this type; the largest must be among them."""
    return _EPSILONS * torch.finfo(dtype).eps * float(np.abs(values).max(initial=0.0))


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues with vectors and error bounds.

    Args:
        values: descending.
        vectors: unit eigenvectors of the first values, one row each; most methods return them for all values.
        residuals: `||A v - lambda v||`. If it follows from the iteration, `rounding` is added. For a dense matrix it
            is computed with the stored entries.
        error_bounds: distance within which an eigenvalue lies: the residual, or `4 r^2 / gap` of a converged value
            whose gap is resolved, plus `rounding`.
        converged: True for each value whose residual is within the tolerance, that is larger than `rounding`, and whose
            rank no 0 that is not found yet can change.
        num_products: products spent.
        orthogonality_loss: largest entry of `Q Q^T - I` of the basis.
        is_orthonormal: True if vectors are orthonormal and values their Rayleigh quotients, as deflation requires.
        num_overlooked: number of values that `with_overlooked` added; None if it was not called.
    """

    values: Float[Tensor, " values"]
    vectors: Float[Tensor, "vectors parameters"]
    residuals: Float[Tensor, " values"]
    error_bounds: Float[Tensor, " values"]
    converged: tuple[bool, ...]
    num_products: int
    orthogonality_loss: float
    is_orthonormal: bool = True
    num_overlooked: int | None = None

    @classmethod
    def of_residuals(
        cls,
        values: Float[Tensor, " values"],
        vectors: Float[Tensor, "values parameters"],
        residuals: Float[Tensor, " values"],
        tolerance: float,
        num_products: int,
    ) -> Eigenpairs:
        """Eigenpairs from computed residuals; a value within the relative tolerance has converged."""
        bounds = residuals + rounding(vectors.dtype, values.numpy())
        converged = tuple((residuals <= tolerance * values.abs()).tolist())
        return cls(values, vectors, residuals, bounds, converged, num_products, orthogonality_loss([vectors]))

    def at(self, positions: Int[Tensor, " positions"]) -> Eigenpairs:
        """Eigenpairs at these positions."""
        return replace(
            self,
            values=self.values[positions],
            vectors=self.vectors[positions.to(self.vectors.device)],
            residuals=self.residuals[positions],
            error_bounds=self.error_bounds[positions],
            converged=tuple(self.converged[place] for place in positions.tolist()),
        )

    def widened(self, support: Support) -> Eigenpairs:
        """Eigenpairs of the whole matrix, from eigenpairs of the part that the loss depends on."""
        return replace(self, vectors=support.widen(self.vectors))


@dataclass(frozen=True)
class Progress:
    """Progress of an iteration.

    Args:
        num_products: products spent.
        num_converged: number of wanted values within the tolerance.
        num_wanted: number of wanted values.
        first: first wanted value so far: the largest, or the smallest if only that end is searched.
        first_error: its error bound.
    """

    num_products: int
    num_converged: int
    num_wanted: int
    first: float
    first_error: float

    @property
    def remark(self) -> str:
        """The products, and the value that is known by now."""
        return f"{self.num_products} products, {self.first:.4g} ± {self.first_error:.1g} so far"


def lanczos(
    operator: SymmetricOperator,
    top_k: int,
    *,
    which: End = "largest",
    tolerance: float = 1e-3,
    max_products: int | None = None,
    max_basis: int | None = None,
    num_vectors: int | None = None,
    seed: int = 0,
    start: Float[Tensor, "vectors parameters"] | None = None,
    state: KrylovState | None = None,
    on_iteration: Callable[[Progress], None] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Eigenpairs:
    """Eigenpairs at an end of the spectrum, each to a relative error.

    The iteration stops when every wanted value has converged (see `Eigenpairs`), or after `max_products`.

    Args:
        operator: the matrix.
        top_k: number of eigenvalues; of each end if `which` is `both`.
        which: end of the spectrum.
        tolerance: error of each value, relative to it.
        max_products: most products; None takes the dimension, at most 40 + 8 for each wanted value.
        max_basis: most vectors of the basis, at least `FEWEST_SPARE` more than wanted values; None sets no limit. When
            the basis is full, only the best Ritz vectors stay. This needs more products; the stopping rule is the same.
        num_vectors: number of eigenvectors to return, for the first values; None returns all.
        seed: seed of the starting vector.
        start: vectors from an earlier, similar matrix; the iteration starts from their sum, if it is not 0, plus a
            random part. Without it an eigenvector orthogonal to all of them would be missed.
        state: earlier iteration on the same matrix to continue; it is updated in place, also up to an interruption.
        on_iteration: function called after each product.
        on_done: called after the last product, before the eigenvectors take memory.

    Raises:
        ConfigError: if more values are wanted than the matrix has, or the basis is too small for them.

    Example:
        >>> from rm_optimizer.landscape.operators.base import MatrixOperator
        >>> matrix = torch.diag(torch.tensor([5.0, 3.0, 1.0, -4.0], dtype=torch.float64))
        >>> [round(value, 6) for value in lanczos(MatrixOperator(matrix), 2).values.tolist()]
        [5.0, 3.0]
    """
    state = KrylovState() if state is None else state
    wanted = num_wanted(operator.dimension, top_k, which)
    limit = most_products(operator.dimension, wanted, max_products, max_basis)
    random = RandomVectors(operator, seed)
    drawn = random.normals(1)[0]
    for _ in range(state.num_restarts):  # a continued state draws as if it had begun here
        random.normals(1)
    if not len(state.basis):
        given = torch.zeros_like(drawn) if start is None else start.to(operator.device, operator.dtype).sum(dim=0)
        state.basis.append(unit(unit(given) + RANDOM_PART * unit(drawn)))
    if not state.diagonal:
        extend(operator, state, random)
    while True:
        ritz = Ritz(operator, state, top_k, which, tolerance)
        if on_iteration is not None:
            on_iteration(ritz.progress(wanted))
        if state.num_products >= limit or ritz.is_done():
            break
        if max_basis is not None and max_basis <= len(state.basis) < operator.dimension:
            if state.num_restarts > 0:  # a full basis has no room for a new space
                break
            # the wanted Ritz vectors stay, and as many of their neighbors as a share of the spare room holds
            further = int(_KEPT_SHARE * (len(state.basis) - wanted))
            state.shrink(np.sort(select(ritz.values, top_k + (further // 2 if which == "both" else further), which)))
        extend(operator, state, random)
    on_done()
    return ritz.eigenpairs(num_vectors)


def most_products(dimension: int, wanted: int, max_products: int | None, max_basis: int | None) -> int:
    """Limit of products; with a bounded basis it may exceed the dimension of the matrix.

    Args:
        dimension: dimension of the matrix.
        wanted: number of wanted eigenvalues.
        max_products: requested limit; None takes the solver's own.
        max_basis: most vectors of the basis; None sets no limit.

    Raises:
        ConfigError: if the basis is too small for them.
    """
    if max_basis is None:
        return min(dimension, max_products or 40 + 8 * wanted)
    if max_basis < min(wanted + FEWEST_SPARE, dimension):
        raise ConfigError(
            f"max_basis must be at least {wanted + FEWEST_SPARE} for {wanted} eigenvalues, got {max_basis}; "
            "raise it or lower top_k"
        )
    return max_products or 2 * (40 + 8 * wanted)


def num_wanted(dimension: int, top_k: int, which: End) -> int:
    """Number of eigenvalues, `top_k` at each end that is searched.

    Raises:
        ConfigError: if the matrix has fewer.
    """
    ends = 2 if which == "both" else 1
    name, most = f"top_k{' at each end' * (ends == 2)}", dimension // ends
    require(1 <= top_k <= most, name, f"lie in [1, {most}]", top_k)
    return top_k * ends


def num_of_ends(count: int, which: End) -> tuple[int, int]:
    """Numbers of wanted values counted from the top and from the bottom."""
    from_bottom = {"smallest": count, "both": count // 2}.get(which, 0)
    return count - from_bottom, from_bottom


class Ritz:
    """The small eigenproblem of an iteration, between two products.

    Args:
        operator: the matrix.
        state: the iteration.
        top_k: number of wanted eigenvalues, at each end if `which` is `both`.
        which: end of the spectrum.
        tolerance: error of each value, relative to it.

    Attributes:
        values: ascending.
        vectors: eigenvectors of the small matrix, one a column.
        residuals: residual of each value.
        bounds: error bound of each value.
        rounded: rounding error of the iteration's own arithmetic, for residuals and bounds.
        selected: positions of the wanted values, by descending value; fewer than wanted as long as the space is small.
        relative: residual of each value, relative to it or to a millionth of the largest.
        within: True for each value whose residual is within the tolerance, or that is 0 within `rounding`.
        may_be_zero: True for each value below `_NEGLIGIBLE` of the largest.
    """

    def __init__(
        self, operator: SymmetricOperator, state: KrylovState, top_k: int, which: End, tolerance: float
    ) -> None:
        self.dtype, self.state = operator.dtype, state
        self.top_k, self.which, self.tolerance = top_k, which, tolerance
        values, self.vectors = state.ritz()
        residuals, magnitudes = np.abs(state.off_diagonal[-1] * self.vectors[-1]), np.abs(values)
        self.values, self.residuals = values, residuals
        self.selected = select(values, top_k, which)
        least = max(_NEGLIGIBLE * float(magnitudes.max()), np.finfo(np.float64).tiny)
        self.rounded = torch.finfo(operator.dtype).eps * float(magnitudes.max())
        self.relative = (residuals + self.rounded) / np.maximum(magnitudes, least)
        has_neighbors = len(values) >= len(self.selected) + 2 or len(values) == operator.dimension
        sharper = np.minimum(residuals, _squared_over_gap(values, residuals)) if has_neighbors else residuals
        errors = np.where(self.relative <= tolerance, sharper, residuals)
        self.bounds = errors + self.rounded + rounding(operator.dtype, values)
        self.within = (self.relative <= tolerance) | (magnitudes + residuals <= _EPSILONS * self.rounded)
        self.may_be_zero = magnitudes <= least

    def progress(self, wanted: int) -> Progress:
        """Progress towards that number of values."""
        first, num_within = self.selected[-(self.which == "smallest")], int(self.within[self.selected].sum())
        value, error = float(self.values[first]), float(self.bounds[first])
        return Progress(self.state.num_products, num_within, wanted, value, error)

    def is_done(self) -> bool:
        """True if all wanted values are within the tolerance, and no space after the first changed them.

        One space is not enough if a wanted value may be 0, of which a matrix of low rank has many copies.
        """
        state, values = self.state, self.values
        wanted = self.top_k * (2 if self.which == "both" else 1)
        if len(self.selected) < wanted or not self.within[self.selected].all():
            return False
        own_couplings = enumerate(state.off_diagonal[state.num_kept : -1], state.num_kept)
        start = max((position + 1 for position, coupling in own_couplings if coupling == 0), default=0)
        is_exhausted = state.off_diagonal[-1] == 0
        if start == 0:  # the first vector of the newest space
            return not (is_exhausted or self.may_be_zero[self.selected].any())
        is_own = (self.vectors[start:] ** 2).sum(axis=0) > 0.5
        own, others = np.flatnonzero(is_own), np.flatnonzero(~is_own)
        ends = own[select(values[own], 1, self.which)]
        before = values[others[select(values[others], self.top_k, self.which)]]
        if len(before) < wanted or not (is_exhausted or self.within[ends].all()):
            return False
        least = _NEGLIGIBLE * float(np.abs(values).max())
        return bool(np.allclose(before, values[self.selected], rtol=self.tolerance, atol=least))

    def eigenpairs(self, num_vectors: int | None = None) -> Eigenpairs:
        """The wanted eigenpairs; fewer than wanted after few products.

        Args:
            num_vectors: number of eigenvectors, for the first values; None returns all.
        """
        selected, state = self.selected, self.state
        given = selected[:num_vectors]
        weights = torch.zeros(len(given), len(state.basis), dtype=torch.float64)
        weights[:, : len(self.values)] = torch.from_numpy(self.vectors[:, given].T.copy())
        rounded = rounding(self.dtype, self.values)
        converged = (self.relative <= self.tolerance) & (np.abs(self.values) > rounded)
        return Eigenpairs(
            values=torch.from_numpy(self.values[selected].copy()),
            vectors=state.basis.combine(weights),
            residuals=torch.from_numpy(self.residuals[selected] + rounded),
            error_bounds=torch.from_numpy(self.bounds[selected]),
            converged=tuple((converged[selected] & self._is_ranked()).tolist()),
            num_products=state.num_products,
            orthogonality_loss=orthogonality_loss(state.basis.rows()),
        )

    def _is_ranked(self) -> NDArray[np.bool_]:
        """False for each wanted value that further copies of a wanted 0 may displace after an early end."""
        values, may_be_zero = self.values[self.selected], self.may_be_zero[self.selected]
        is_bottom = np.arange(len(values)) >= num_of_ends(len(values), self.which)[0]
        behind = is_bottom & (values > 0) & may_be_zero[is_bottom].any()
        behind |= ~is_bottom & (values < 0) & may_be_zero[~is_bottom].any()
        return np.asarray(~behind | self.is_done())


def select(values: np.ndarray, top_k: int, which: End) -> NDArray[np.int64]:
    """Positions of the wanted among ascending values, by descending value."""
    size = len(values)
    if which == "magnitude":
        chosen = np.argsort(-np.abs(values))[:top_k]
    elif which == "largest":
        chosen = np.arange(max(0, size - top_k), size)
    elif which == "smallest":
        chosen = np.arange(min(top_k, size))
    else:
        low = min(top_k, size // 2)
        chosen = np.union1d(np.arange(low), np.arange(max(low, size - top_k), size))
    order: NDArray[np.int64] = chosen[np.argsort(-values[chosen])]
    return order


def _squared_over_gap(values: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """`4 r^2 / gap` where the gap is resolved, else `r`.

    The gap is the distance to the nearest neighbor less that neighbor's own error. It is resolved if `r` is at most a
    tenth of it. With a larger `r`, an eigenvalue that is not found yet may lie in the gap.
    """
    distance = np.concatenate([[np.inf], np.diff(values), [np.inf]])
    uncertain = np.concatenate([[0.0], residuals, [0.0]])
    gaps = np.minimum(distance[:-1] - uncertain[:-2], distance[1:] - uncertain[2:])
    usable = gaps > _RESOLVED * residuals
    bounds: np.ndarray = np.where(usable, _UNSEEN * residuals**2 / np.where(usable, gaps, 1.0), residuals)
    return bounds
