"""Operators made of others."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.base import SymmetricOperator


class DeflatedOperator:
    """`P A P` with `P` the projection that removes orthonormal vectors.

    Args:
        operator: the matrix `A`.
        vectors: what is removed, one a row.
    """

    def __init__(self, operator: SymmetricOperator, vectors: Float[Tensor, "removed parameters"]) -> None:
        self.operator = operator
        self.vectors = vectors.to(operator.device, operator.dtype)
        self.dimension = operator.dimension
        self.dtype = operator.dtype
        self.device = operator.device

    def project(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The vectors without their parts along the removed ones."""
        for _ in range(2):
            vectors = vectors - (vectors @ self.vectors.T) @ self.vectors
        return vectors

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        return self.project(self.operator.apply(self.project(vectors)))


class DifferenceOperator:
    """`A - B`."""

    def __init__(self, first: SymmetricOperator, second: SymmetricOperator) -> None:
        self.first = first
        self.second = second
        self.dimension = first.dimension
        self.dtype: torch.dtype = first.dtype
        self.device = first.device

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        return self.first.apply(vectors) - self.second.apply(vectors)
