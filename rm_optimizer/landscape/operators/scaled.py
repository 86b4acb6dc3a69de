"""A symmetric matrix after a rescaling of the parameters."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.differences import GradientDifferences


class ScaledDifferences:
    """`S A S` with a diagonal `S`: for an optimizer with preconditioner `P`, `S = P^{-1/2}` and `A` is the Hessian.

    Args:
        matrix: the matrix `A`.
        scale: diagonal of `S`.
    """

    def __init__(self, matrix: GradientDifferences, scale: Float[Tensor, " parameters"]) -> None:
        self.matrix = matrix
        self.dimension = matrix.dimension
        self.dtype = matrix.dtype
        self.device = matrix.device
        self.scale = scale.to(self.device, self.dtype)

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        return self.scale * self.matrix.apply(self.scale * vectors)

    def along(self, vector: Float[Tensor, " parameters"]) -> float:
        """`v^T S A S v`."""
        return self.matrix.along(self.scale * vector)
