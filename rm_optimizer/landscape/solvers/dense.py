"""All eigenvalues of a small operator."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, rounding

LARGEST = 20_000
"""Most rows of a matrix that is written out: 3.2 GB in float64."""
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
    """All eigenpairs, by writing the matrix out; their error is the rounding of its products.

    Residuals are those of the vectors, in the operator's type, on the matrix as written out.
    """
    matrix = dense_matrix(operator)
    values, columns = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), columns.T.flip(0).to(operator.dtype)
    parts = zip(vectors.split(_ROWS_AT_ONCE), values.split(_ROWS_AT_ONCE), strict=True)
    residuals = torch.cat([(rows.double() @ matrix - some[:, None] * rows).norm(dim=1) for rows, some in parts]).cpu()
    values = values.cpu()
    bounds = torch.full_like(values, rounding(operator.dtype, values.numpy()))
    return Eigenpairs(values, vectors, residuals, bounds, (True,) * len(values), operator.dimension, 0.0)
