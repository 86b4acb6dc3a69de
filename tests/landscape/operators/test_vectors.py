"""Long vectors keep seven digits, and so do the eigenvalues found with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rm_optimizer.landscape.operators.vectors import gram_matrix, inner, length, unit
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.landscape.solvers.reference import power_iteration

MANY = 4_000_000  # where float32 terms added one after another lose 1e-4


def test_lengths_and_products_are_those_of_float64():
    left, right = torch.randn(2, MANY, generator=torch.Generator().manual_seed(0))
    right += left
    assert length(left) == pytest.approx(float(left.double().norm()), rel=1e-6)
    assert inner(left, right) == pytest.approx(float(left.double() @ right.double()), rel=1e-6)
    assert float(unit(left).double().norm()) == pytest.approx(1, rel=1e-6)
    assert not unit(torch.zeros(3)).any()
    both = torch.stack([left, right]).double()
    assert torch.allclose(gram_matrix([left[None], right[None]]), both @ both.T, rtol=2e-6)


class Diagonal:
    """Two large eigenvalues among small ones."""

    dimension, dtype, device, is_semidefinite = MANY, torch.float32, torch.device("cpu"), True

    def __init__(self) -> None:
        self.values = torch.full((MANY,), 0.01)
        self.values[:2] = torch.tensor([3.0, 2.0])

    def apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.values


def test_eigenvalues_of_many_parameters_are_right_to_six_digits():
    # spread eigenvectors: a rotation by a Householder reflection along all ones
    class Spread(Diagonal):
        def apply(self, vectors: Tensor) -> Tensor:
            return reflected(super().apply(reflected(vectors)))

    def reflected(vectors: Tensor) -> Tensor:
        return vectors - 2 * vectors.double().mean(dim=1, keepdim=True).float()

    found = lanczos(Spread(), 2, tolerance=1e-6)
    assert found.values.tolist() == pytest.approx([3.0, 2.0], rel=2e-6)
    assert found.orthogonality_loss < 1e-5
    assert power_iteration(Diagonal(), 1, tolerance=1e-5).values.tolist() == pytest.approx([3.0], rel=2e-5)
