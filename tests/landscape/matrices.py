"""Matrices whose eigenvalues are known, and their largest eigenpairs."""

from __future__ import annotations

from functools import cache

import torch
from scipy.stats import t as student_t
from torch import Tensor

from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, lanczos

SIZE = 120


@cache
def spectra() -> dict[str, Tensor]:
    rank = torch.arange(1, SIZE + 1, dtype=torch.float64)
    signs = torch.where(torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) < 0.4, -1.0, 1.0)
    return {"decaying": 10 / rank, "indefinite": 10 * rank**-0.7 * signs, "flat": 1 + rank / SIZE}


@cache
def operator(name: str) -> MatrixOperator:
    drawn = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    basis = torch.linalg.qr(drawn)[0]
    return MatrixOperator((basis * spectra()[name]) @ basis.T)


@cache
def top(name: str) -> Eigenpairs:
    return lanczos(operator(name), 10, which="magnitude", tolerance=1e-4)


@cache
def hard_for_intervals(name: str) -> MatrixOperator:
    """Matrices whose quadratic forms of random signs are skewed, heavy-tailed or often equal."""
    drawn = torch.Generator().manual_seed(2)
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    if name == "all ones":
        matrix += 1
    elif name == "two coordinates":
        matrix[0, 1] = matrix[1, 0] = 1
    elif name == "rank 8":
        basis = torch.linalg.qr(torch.randn(SIZE, 8, generator=drawn, dtype=torch.float64))[0]
        matrix = (basis * torch.arange(1.0, 9.0, dtype=torch.float64)) @ basis.T
    else:  # few entries with the tails of Student's distribution of 1.5 degrees of freedom
        places = torch.randint(SIZE, (2, 2 * SIZE), generator=drawn)
        uniform = torch.rand(2 * SIZE, generator=drawn, dtype=torch.float64).numpy()
        matrix[places[0], places[1]] = torch.from_numpy(student_t.ppf(uniform, 1.5))
        matrix = matrix + matrix.T
    return MatrixOperator(matrix)


HARD = ("all ones", "two coordinates", "rank 8", "sparse heavy-tailed")
