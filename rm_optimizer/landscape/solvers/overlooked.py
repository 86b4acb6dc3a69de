"""Search for eigenvalues that an iteration overlooked, such as copies and close pairs."""

from __future__ import annotations

from dataclasses import replace

import torch

from rm_optimizer.landscape.operators.base import DeflatedOperator, SymmetricOperator
from rm_optimizer.landscape.operators.vectors import RandomVectors, unit
from rm_optimizer.landscape.solvers.krylov import KrylovState
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, End, lanczos, num_of_ends, rounding, select

CHECK_PRODUCTS = 8
"""Least number of products that reveal an extreme value of the rest, if it lies beyond the found values."""
_CHECK_SHARE = 4
"""Products of the iteration for one product of the search; at the edge of a wide bulk both converge slowly."""


def with_overlooked(
    operator: SymmetricOperator, found: Eigenpairs, which: End, *, tolerance: float, seed: int
) -> Eigenpairs:
    """Return the eigenpairs together with those that the iteration overlooked, in order.

    A Krylov space contains one vector of a repeated eigenvalue, and reveals the second one of a close pair late. After
    removal of the found vectors `V`, an overlooked eigenvalue is an extreme one of `(1 - V^T V) A (1 - V^T V)`. Lanczos
    from a random vector of the rest reveals it within `CHECK_PRODUCTS`, or a quarter of the iteration's own products if
    that is more. A value beyond the innermost found one is iterated until it converges. Then the search is repeated.

    Args:
        operator: the matrix.
        found: eigenpairs at that end, orthonormal and converged. One that did not converge may contain a part of a
            copy, which is then not found.
        which: end of the spectrum.
        tolerance: relative error of each value; for a new value, its relative residual.
        seed: seed of the random vectors.

    Returns:
        As many pairs as were given. The residual of a new pair includes the possible contribution of the old residuals.
        If there are new pairs, all error bounds are residuals, since gaps were computed without the new values.
    """
    found = replace(found, num_overlooked=0)
    num_products = max(CHECK_PRODUCTS, found.num_products // _CHECK_SHARE)
    for attempt in range(len(found.values)):
        missed = _beyond(operator, found, which, tolerance, num_products, seed + attempt)
        before = found.num_overlooked
        found = _merged(found, missed, which, tolerance)
        if found.num_overlooked == before:
            break
    return found


def _beyond(
    operator: SymmetricOperator, found: Eigenpairs, which: End, tolerance: float, num_products: int, seed: int
) -> Eigenpairs:
    """Extreme eigenpairs of the rest after some products, iterated further only if one lies beyond the found values."""
    values, ends = found.values.tolist(), 2 if which == "both" else 1
    from_top = num_of_ends(len(values), which)[0]
    inner = [*values[:from_top][-1:], *values[from_top:][:1]]  # where found vectors lie beyond nothing
    rest = DeflatedOperator(operator, found.vectors, value=0.0 if which == "magnitude" else sum(inner) / len(inner))
    state, rounded = KrylovState(), rounding(operator.dtype, found.values.numpy())
    free = operator.dimension - len(found.values)
    if free < ends:
        return replace(found.at(torch.tensor([], dtype=torch.int64)), num_products=0)
    state.basis.append(unit(rest.project(RandomVectors(operator, seed).normals(1))[0]))
    count = min(num_products, free)
    for limit in (count, min(free, 40 + count)):
        missed = lanczos(rest, 1, which=which, tolerance=tolerance, max_products=limit, seed=seed, state=state)
        margins = (tolerance * missed.values.abs()).clamp(min=rounded).tolist()
        places = zip(missed.values.tolist(), margins, strict=True)
        chosen = [i for i, (value, margin) in enumerate(places) if _is_beyond(value, margin, found, which)]
        is_done = (missed.values.abs() + missed.residuals <= 2 * rounded) | torch.tensor(missed.converged)
        if is_done[chosen].all():
            break
    return missed.at(torch.tensor(chosen, dtype=torch.int64))


def _is_beyond(value: float, margin: float, found: Eigenpairs, which: End) -> bool:
    """True if a value of the rest belongs among the found ones, beyond tolerance and rounding."""
    values: list[float] = found.values.tolist()
    if which == "magnitude":
        return abs(value) > min(map(abs, values)) + margin
    from_top, from_bottom = num_of_ends(len(values), which)
    is_top = from_top > 0 and value > values[from_top - 1] + margin
    return is_top or (from_bottom > 0 and value < values[-from_bottom] - margin)


def _merged(found: Eigenpairs, missed: Eigenpairs, which: End, tolerance: float) -> Eigenpairs:
    """The wanted ones of the old and new pairs; the rows of the old vectors stay unchanged."""
    found = replace(found, num_products=found.num_products + missed.num_products)
    if not len(missed.values):
        return found
    rounded, sizes = rounding(found.vectors.dtype, found.values.numpy()), missed.values.abs()
    coupling = (found.residuals - rounded).clamp(min=0).square().sum()  # the rounding of products counts once
    residuals = (missed.residuals.square() + coupling).sqrt()
    converged = tuple(((residuals - rounded <= tolerance * sizes) & (sizes > rounded)).tolist())
    values = torch.cat([found.values, missed.values])
    ascending = values.argsort()
    top_k = len(found.values) // (2 if which == "both" else 1)
    residuals = torch.cat([found.residuals, residuals])
    both = replace(
        found,
        values=values,
        vectors=torch.cat([found.vectors, missed.vectors]),
        residuals=residuals,
        error_bounds=residuals,
        converged=(*found.converged, *converged),
        num_overlooked=(found.num_overlooked or 0) + len(missed.values),
    )
    return both.at(ascending[torch.from_numpy(select(values[ascending].numpy(), top_k, which))])
