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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.operators.support import Support
from rm_optimizer.landscape.operators.vectors import RandomVectors, orthogonality_loss, unit
from rm_optimizer.landscape.solvers.krylov import KrylovState, extend

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

    def widened(self, support: Support) -> Eigenpairs:
        """Eigenpairs of the whole matrix, from those of the part that the loss depends on."""
        return replace(self, vectors=support.widen(self.vectors))


@dataclass(frozen=True)
class Progress:
    """Progress of an iteration.

    Args:
        num_products: products spent.
        num_converged: number of wanted values within the tolerance.
        num_wanted: number of wanted values.
        worst_error: largest relative residual of a wanted value.
        top: largest value so far.
    """

    num_products: int
    num_converged: int
    num_wanted: int
    worst_error: float
    top: float


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
        num_vectors: number of eigenvectors to return, those of the first values; None returns all.
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
    _begin(operator, state, random, start)
    for ritz in _iterations(operator, state, random, top_k, which, max_basis, tolerance):
        if on_iteration is not None:
            on_iteration(_progress(state, ritz, wanted))
        if state.num_products >= limit or _is_done(state, ritz):
            break
    on_done()
    return _eigenpairs(operator, state, ritz, num_vectors)


def _iterations(
    operator: SymmetricOperator,
    state: KrylovState,
    random: RandomVectors,
    top_k: int,
    which: End,
    max_basis: int | None,
    tolerance: float,
) -> Iterator[_Ritz]:
    """Yield the small eigenproblem after each product; end only if a full basis has no room for a new space.

    A full basis shrinks before the next product.
    """
    wanted = num_wanted(operator.dimension, top_k, which)
    while True:
        ritz = _ritz(operator, state, top_k, which, tolerance)
        yield ritz
        if max_basis is not None and max_basis <= len(state.basis) < operator.dimension:
            if state.num_restarts > 0:
                return
            state.shrink(_worth_keeping(ritz, len(state.basis) - wanted, top_k, which))
        extend(operator, state, random)


def _begin(operator: SymmetricOperator, state: KrylovState, random: RandomVectors, start: Tensor | None) -> None:
    """Add the first vector and its product if the state is empty; a continued state draws as if it had begun here."""
    drawn = random.normals(1)[0]
    for _ in range(state.num_restarts):
        random.normals(1)
    if not len(state.basis):
        given = torch.zeros_like(drawn) if start is None else start.to(operator.device, operator.dtype).sum(dim=0)
        state.basis.append(unit(unit(given) + RANDOM_PART * unit(drawn)))
    if not state.diagonal:
        extend(operator, state, random)


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


def _worth_keeping(ritz: _Ritz, num_spare: int, top_k: int, which: End) -> NDArray[np.int64]:
    """Positions of the wanted Ritz vectors, and of those of their neighbors that a share of the spare room holds."""
    further = int(_KEPT_SHARE * num_spare)
    return np.sort(select(ritz.values, top_k + (further // 2 if which == "both" else further), which))


def num_wanted(dimension: int, top_k: int, which: End) -> int:
    """Number of eigenvalues, `top_k` at each end that is searched.

    Raises:
        ConfigError: if the matrix has fewer.
    """
    ends = 2 if which == "both" else 1
    if not 1 <= top_k <= dimension // ends:
        where = " at each end" if ends == 2 else ""
        raise ConfigError(f"top_k{where} must lie in [1, {dimension // ends}], got {top_k}")
    return top_k * ends


def eigenpairs_so_far(
    operator: SymmetricOperator, state: KrylovState, top_k: int, which: End, tolerance: float
) -> Eigenpairs:
    """Eigenpairs of an unfinished iteration; fewer than `top_k` after few products."""
    return _eigenpairs(operator, state, _ritz(operator, state, top_k, which, tolerance))


@dataclass(frozen=True)
class _Ritz:
    """The small eigenproblem after a product.

    Args:
        values: ascending.
        vectors: eigenvectors of the tridiagonal matrix, one a column.
        residuals: residual of each value.
        errors: each error bound without the rounding of products.
        rounded: rounding error of the iteration's own arithmetic, for residuals and errors.
        selected: positions of the wanted values, by descending value; fewer than wanted as long as the space is small.
        relative: residual of each value, relative to it or to a millionth of the largest.
        within: True for each value whose residual is within the tolerance, or that is 0 within `rounding`.
        may_be_zero: True for each value below `_NEGLIGIBLE` of the largest.
        top_k: number of wanted eigenvalues, at each end if `which` is `both`.
        which: end of the spectrum.
        tolerance: error of each value, relative to it.
    """

    values: np.ndarray
    vectors: np.ndarray
    residuals: np.ndarray
    errors: np.ndarray
    rounded: float
    selected: NDArray[np.int64]
    relative: np.ndarray
    within: NDArray[np.bool_]
    may_be_zero: NDArray[np.bool_]
    top_k: int
    which: End
    tolerance: float


def _ritz(operator: SymmetricOperator, state: KrylovState, top_k: int, which: End, tolerance: float) -> _Ritz:
    values, vectors = state.ritz()
    residuals, magnitudes = np.abs(state.off_diagonal[-1] * vectors[-1]), np.abs(values)
    selected = select(values, top_k, which)
    least = max(_NEGLIGIBLE * float(magnitudes.max()), np.finfo(np.float64).tiny)
    rounded = torch.finfo(operator.dtype).eps * float(magnitudes.max())
    relative = (residuals + rounded) / np.maximum(magnitudes, least)
    has_neighbors = len(values) >= len(selected) + 2 or len(values) == operator.dimension
    sharper = np.minimum(residuals, _squared_over_gap(values, residuals)) if has_neighbors else residuals
    errors = np.where(relative <= tolerance, sharper, residuals)
    within = (relative <= tolerance) | (magnitudes + residuals <= _EPSILONS * rounded)
    is_small = magnitudes <= least
    return _Ritz(
        values, vectors, residuals, errors, rounded, selected, relative, within, is_small, top_k, which, tolerance
    )


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


def _is_done(state: KrylovState, ritz: _Ritz) -> bool:
    """True if all wanted values are within the tolerance, and no space after the first changed them.

    One space is not enough if a wanted value may be 0, of which a matrix of low rank has many copies.
    """
    wanted = ritz.top_k * (2 if ritz.which == "both" else 1)
    if len(ritz.selected) < wanted or not ritz.within[ritz.selected].all():
        return False
    start, is_exhausted = state.start_of_newest, state.off_diagonal[-1] == 0
    if start == 0:
        return not (is_exhausted or ritz.may_be_zero[ritz.selected].any())
    is_own = (ritz.vectors[start:] ** 2).sum(axis=0) > 0.5
    own, others = np.flatnonzero(is_own), np.flatnonzero(~is_own)
    ends = own[select(ritz.values[own], 1, ritz.which)]
    before = ritz.values[others[select(ritz.values[others], ritz.top_k, ritz.which)]]
    if len(before) < wanted or not (is_exhausted or ritz.within[ends].all()):
        return False
    now, least = ritz.values[ritz.selected], _NEGLIGIBLE * float(np.abs(ritz.values).max())
    return bool(np.allclose(before, now, rtol=ritz.tolerance, atol=least))


def _is_ranked(state: KrylovState, ritz: _Ritz) -> NDArray[np.bool_]:
    """False for each wanted value that further copies of a wanted 0 may displace, since the iteration ended early."""
    values, may_be_zero = ritz.values[ritz.selected], ritz.may_be_zero[ritz.selected]
    num_bottom = {"smallest": len(values), "both": len(values) // 2}.get(ritz.which, 0)
    is_bottom = np.arange(len(values)) >= len(values) - num_bottom
    behind = is_bottom & (values > 0) & may_be_zero[is_bottom].any()
    behind |= ~is_bottom & (values < 0) & may_be_zero[~is_bottom].any()
    return ~behind | _is_done(state, ritz)


def _progress(state: KrylovState, ritz: _Ritz, wanted: int) -> Progress:
    relative, num_within = ritz.relative[ritz.selected], int(ritz.within[ritz.selected].sum())
    worst = float(relative.max(initial=0.0)) if len(relative) == wanted else np.inf
    return Progress(state.num_products, num_within, wanted, worst, float(ritz.values[-1]))


def _eigenpairs(
    operator: SymmetricOperator,
    state: KrylovState,
    ritz: _Ritz,
    num_vectors: int | None = None,
) -> Eigenpairs:
    selected = ritz.selected
    given = selected[:num_vectors]
    weights = torch.zeros(len(given), len(state.basis), dtype=torch.float64)
    weights[:, : len(ritz.values)] = torch.from_numpy(ritz.vectors[:, given].T.copy())
    rounded = rounding(operator.dtype, ritz.values)
    converged = (ritz.relative <= ritz.tolerance) & (np.abs(ritz.values) > rounded)
    converged = converged[selected] & _is_ranked(state, ritz)
    return Eigenpairs(
        values=torch.from_numpy(ritz.values[selected].copy()),
        vectors=state.basis.combine(weights),
        residuals=torch.from_numpy(ritz.residuals[selected] + rounded),
        error_bounds=torch.from_numpy(ritz.errors[selected] + ritz.rounded + rounded),
        converged=tuple(converged.tolist()),
        num_products=state.num_products,
        orthogonality_loss=orthogonality_loss(state.basis.rows()),
    )
