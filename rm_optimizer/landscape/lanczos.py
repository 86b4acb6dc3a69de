"""Extreme eigenpairs of a symmetric operator by Lanczos with full reorthogonalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.krylov import KrylovState
from rm_optimizer.landscape.operators import SymmetricOperator
from rm_optimizer.landscape.random_vectors import RandomVectors
from rm_optimizer.landscape.vectors import inner, length, orthogonality_loss, unit

End = Literal["largest", "smallest", "magnitude", "both"]
"""Which eigenvalues: from the top, from the bottom, by magnitude, or as many from the top as from the bottom."""
_BREAKDOWN = 1e-6
"""Rest of a new direction, relative to the operator's norm, below which the space counts as exhausted (float32)."""
_NEGLIGIBLE = 1e-6
"""Values below this share of the largest need no accuracy relative to themselves."""


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues with vectors and how far to trust them.

    Args:
        values: descending.
        vectors: unit vectors, one row for each value.
        residuals: `||A v - lambda v||`; some eigenvalue lies within it.
        error_bounds: `min(r, r^2 / gap)` (Parlett, 1998, Theorem 11.7.1), with the gap to the other values computed.
        converged: whether each error bound is within the tolerance asked for.
        num_products: products spent.
        orthogonality_loss: largest entry of `Q Q^T - I` of the basis.
    """

    values: Float[Tensor, " values"]
    vectors: Float[Tensor, "values parameters"]
    residuals: Float[Tensor, " values"]
    error_bounds: Float[Tensor, " values"]
    converged: tuple[bool, ...]
    num_products: int
    orthogonality_loss: float


@dataclass(frozen=True)
class Progress:
    """Where an iteration stands, for a progress bar.

    Args:
        num_products: products spent.
        num_converged: wanted values whose error bound is within the tolerance.
        num_wanted: values wanted.
        worst_error: largest error bound of a wanted value, relative to it.
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
    seed: int = 0,
    start: Float[Tensor, "vectors parameters"] | None = None,
    state: KrylovState | None = None,
    on_iteration: Callable[[Progress], None] | None = None,
) -> Eigenpairs:
    """Eigenpairs at an end of the spectrum, each to a relative error.

    Builds an orthonormal basis `Q` of the Krylov space, every new vector orthogonalised twice against all others, and
    solves `Q A Q^T` in float64 (Lanczos, 1950; Parlett, 1998, chapter 13). Stops when `min(r, r^2 / gap) <= tolerance
    |value|` for every wanted value, or when the space or the products run out; `converged` tells which hold then.

    Args:
        operator: the matrix.
        top_k: how many eigenvalues; of each end where `which` is `both`.
        which: end of the spectrum.
        tolerance: relative error of each value.
        max_products: most products; None is the dimension, at most 40 + 8 for each value wanted.
        seed: of the starting vector.
        start: vectors from an earlier, similar matrix; the iteration starts from their sum.
        state: an earlier iteration on the same matrix to continue; holds the newest one also when interrupted.
        on_iteration: told after each product.

    Raises:
        ConfigError: if more values are wanted than the matrix has.

    Example:
        >>> from rm_optimizer.landscape.operators import MatrixOperator
        >>> matrix = torch.diag(torch.tensor([5.0, 3.0, 1.0, -4.0], dtype=torch.float64))
        >>> [round(value, 6) for value in lanczos(MatrixOperator(matrix), 2).values.tolist()]
        [5.0, 3.0]
    """
    wanted = _num_wanted(operator.dimension, top_k, which)
    state = KrylovState() if state is None else state
    limit = min(operator.dimension, max_products or 40 + 8 * wanted)
    random = RandomVectors(operator, seed)
    if not len(state.basis):
        state.basis.append(unit(random.normals(1)[0] if start is None else start.to(operator.dtype).sum(dim=0)))
    while True:
        selected = _select(state, top_k, which) if state.diagonal else np.empty(0, int)
        _, relative = _errors(operator, state, selected)
        if on_iteration is not None and state.diagonal:
            on_iteration(_progress(state, relative, wanted, tolerance))
        done = len(selected) == wanted and bool((relative <= tolerance).all())
        if done or len(state.diagonal) >= limit:
            return eigenpairs_so_far(operator, state, top_k, which, tolerance)
        extend(operator, state, random)


def _num_wanted(dimension: int, top_k: int, which: End) -> int:
    ends = 2 if which == "both" else 1
    if not 1 <= top_k <= dimension // ends:
        where = " at each end" if ends == 2 else ""
        raise ConfigError(f"top_k{where} must lie in [1, {dimension // ends}], got {top_k}")
    return top_k * ends


def eigenpairs_so_far(
    operator: SymmetricOperator, state: KrylovState, top_k: int, which: End, tolerance: float
) -> Eigenpairs:
    """What an iteration has found until now; fewer than `top_k` while it is young."""
    selected = _select(state, top_k, which)
    errors, relative = _errors(operator, state, selected)
    return _eigenpairs(operator, state, selected, errors, relative <= tolerance)


def extend(operator: SymmetricOperator, state: KrylovState, random: RandomVectors) -> None:
    """Spend one product, and add the next basis vector where there is one; at random where the space is used up."""
    product = operator.apply(state.basis.last()[None])[0]
    state.num_products += 1
    along = inner(product, state.basis.last())
    rest = state.basis.orthogonalise(product)
    norm = length(rest)
    scale = max(map(abs, (*state.diagonal, *state.off_diagonal, along)))
    exhausted = norm <= (_BREAKDOWN if operator.dtype == torch.float32 else 1e-12) * scale or norm == 0
    state.diagonal.append(along)
    state.off_diagonal.append(0.0 if exhausted else norm)
    if len(state.basis) == operator.dimension:
        return
    if exhausted:
        state.num_restarts += 1
        rest = state.basis.orthogonalise(random.normals(1)[0])
    state.basis.append(unit(rest))


def _select(state: KrylovState, top_k: int, which: End) -> NDArray[np.int64]:
    """Positions of the wanted Ritz values, by descending value; fewer while the space is small."""
    values, _ = state.ritz()
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


def _errors(
    operator: SymmetricOperator, state: KrylovState, selected: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Error bounds of the selected values, absolute and relative to each or to a millionth of the largest."""
    if not len(selected):
        return np.empty(0), np.empty(0)
    values, _ = state.ritz()
    residuals = _residuals(state)
    has_neighbours = len(values) >= len(selected) + 2 or len(values) == operator.dimension
    bounds = np.minimum(residuals, _squared_over_gap(values, residuals)) if has_neighbours else residuals
    largest = float(np.abs(values).max())
    bounds = bounds + torch.finfo(operator.dtype).eps * largest
    scale = np.maximum(np.abs(values), max(_NEGLIGIBLE * largest, np.finfo(np.float64).tiny))
    return bounds[selected], (bounds / scale)[selected]


def _residuals(state: KrylovState) -> NDArray[np.float64]:
    _, vectors = state.ritz()
    residuals: NDArray[np.float64] = np.abs(state.off_diagonal[-1] * vectors[-1])
    return residuals


def _squared_over_gap(values: NDArray[np.float64], residuals: NDArray[np.float64]) -> NDArray[np.float64]:
    """`r^2 / gap`, the gap being the distance to the nearest neighbour, less what that may still move."""
    distance = np.concatenate([[np.inf], np.diff(values), [np.inf]])
    uncertain = np.concatenate([[0.0], residuals, [0.0]])
    gaps = np.minimum(distance[:-1] - uncertain[:-2], distance[1:] - uncertain[2:])
    usable = gaps > residuals
    bounds: NDArray[np.float64] = np.where(usable, residuals**2 / np.where(usable, gaps, 1.0), residuals)
    return bounds


def _progress(state: KrylovState, relative: NDArray[np.float64], wanted: int, tolerance: float) -> Progress:
    values, _ = state.ritz()
    worst = float(relative.max(initial=0.0)) if len(relative) == wanted else np.inf
    return Progress(state.num_products, int((relative <= tolerance).sum()), wanted, worst, float(values[-1]))


def _eigenpairs(
    operator: SymmetricOperator,
    state: KrylovState,
    selected: NDArray[np.int64],
    errors: NDArray[np.float64],
    converged: NDArray[np.bool_],
) -> Eigenpairs:
    values, vectors = state.ritz()
    weights = torch.zeros(len(selected), len(state.basis), dtype=torch.float64)
    weights[:, : len(values)] = torch.from_numpy(vectors[:, selected].T.copy())
    return Eigenpairs(
        values=torch.from_numpy(values[selected].copy()),
        vectors=state.basis.combine(weights),
        residuals=torch.from_numpy(_residuals(state)[selected].copy()),
        error_bounds=torch.from_numpy(errors),
        converged=tuple(converged.tolist()),
        num_products=state.num_products,
        orthogonality_loss=orthogonality_loss(state.basis.rows()),
    )
