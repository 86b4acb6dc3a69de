"""Matrices whose eigenvalues are known, and their largest eigenpairs."""

from __future__ import annotations

from functools import cache

import torch
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
