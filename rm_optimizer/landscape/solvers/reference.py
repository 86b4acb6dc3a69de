"""Reference solvers: all eigenpairs of the dense matrix, and power iteration with deflation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import DeflatedOperator, SymmetricOperator
from rm_optimizer.landscape.operators.vectors import (
    RandomVectors,
    inner,
    length,
    pairwise_inner,
    unit,
)
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, num_wanted, rounding

LARGEST = 20_000
"""Most rows of a dense matrix: 3.2 GB in float64."""
_ROWS_AT_ONCE = 32


def dense_matrix(operator: SymmetricOperator) -> Float[Tensor, "parameters parameters"]:
    """The matrix in float64, from one product for each row and symmetrized.

    Raises:
        ConfigError: if it has more than `LARGEST` rows.
    """
    size = operator.dimension
    if size > LARGEST:
        raise ConfigError(
            f"method=full writes out a matrix of {size} rows, more than {LARGEST}; "
            "use method=lanczos or name fewer params"
        )
    matrix = torch.empty(size, size, dtype=torch.float64, device=operator.device)
    for start in range(0, size, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, size)
        unit = torch.zeros(stop - start, size, dtype=operator.dtype, device=operator.device)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        matrix[start:stop] = operator.apply(unit).double()
    return (matrix + matrix.T) / 2


def full_spectrum(operator: SymmetricOperator) -> Eigenpairs:
    """Compute all eigenpairs of the dense matrix; their only error is the rounding of products.

    Residuals are computed from the vectors, in the operator's type, with the dense matrix.
    """
    matrix = dense_matrix(operator)
    values, columns = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), columns.T.flip(0).to(operator.dtype)
    parts = zip(vectors.split(_ROWS_AT_ONCE), values.split(_ROWS_AT_ONCE), strict=True)
    residuals = torch.cat([(rows.double() @ matrix - some[:, None] * rows).norm(dim=1) for rows, some in parts]).cpu()
    values = values.cpu()
    bounds = torch.full_like(values, rounding(operator.dtype, values.numpy()))
    return Eigenpairs(values, vectors, residuals, bounds, (True,) * len(values), operator.dimension, 0.0)


def power_iteration(
    operator: SymmetricOperator, top_k: int, *, tolerance: float = 1e-3, max_products: int = 2000, seed: int = 0
) -> Eigenpairs:
    """Eigenpairs of largest magnitude, one after the other, by `v <- A v / ||A v||` with the found ones deflated.

    The iteration stops when `||A v - lambda v|| <= tolerance |lambda|`, without the component along found vectors. It
    does not stop because the value changed little: with two eigenvalues of similar magnitude and opposite sign, the
    value changes little long before it is right. At the end, the vectors are replaced by the Rayleigh-Ritz pairs of
    their space, without more products, since errors of found vectors remain in later ones. Residuals are computed
    from the whole product.

    Args:
        operator: the matrix.
        top_k: number of eigenpairs.
        tolerance: relative residual that ends each.
        max_products: most products in total, divided evenly among the values.
        seed: seed of the starting vectors.

    Raises:
        ConfigError: if more values are wanted than the matrix has.
    """
    num_wanted(operator.dimension, top_k, "magnitude")
    random = RandomVectors(operator, seed)
    vectors = torch.empty(0, operator.dimension, dtype=operator.dtype, device=operator.device)
    images, spent = vectors, 0
    for _ in range(top_k):
        rest = DeflatedOperator(operator, vectors)
        vector = unit(rest.project(random.normals(1))[0])[None]
        for _ in range(max(1, max_products // top_k)):
            image = operator.apply(vector)
            left = rest.project(image)
            spent += 1
            value, latest = inner(vector[0], left[0]), vector
            if _residual(vector[0], left[0], value) <= tolerance * abs(value) or not left.any():
                break
            vector = unit(left[0])[None]
        vectors, images = torch.cat([vectors, latest]), torch.cat([images, image])
    small = pairwise_inner(vectors, images).cpu()
    ascending, turn = torch.linalg.eigh((small + small.T) / 2)
    values, turn = ascending.flip(0), turn.T.flip(0).to(vectors)
    vectors, images = turn @ vectors, turn @ images
    each = zip(vectors, images, values.tolist(), strict=True)
    residuals = torch.tensor([_residual(*pair) for pair in each], dtype=torch.float64)
    return Eigenpairs.of_residuals(values, vectors, residuals, tolerance, spent)


def _residual(vector: Tensor, image: Tensor, value: float) -> float:
    return length(image - value * vector)
