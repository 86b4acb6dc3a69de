"""Matrix of a loss over the weights that the loss depends on."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.base import LossOperator
from rm_optimizer.landscape.operators.support import Support, support_of
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs


class SupportedOperator:
    """A matrix of a loss without rows and columns of zeros.

    Args:
        operator: the matrix.
        support: remaining rows; None takes those of `support_of`.
    """

    def __init__(self, operator: LossOperator, support: Support | None = None) -> None:
        self._operator = operator
        self.support = support or support_of(operator.objective)
        self.dimension = self.support.dimension
        self.dtype = operator.dtype
        self.device = operator.device

    def apply(self, vectors: Float[Tensor, "vectors dimension"]) -> Float[Tensor, "vectors dimension"]:
        """The matrix times each row."""
        return self.support.narrow(self._operator.apply(self.support.widen(vectors)))

    def widened(self, pairs: Eigenpairs) -> Eigenpairs:
        """Convert its eigenpairs to those of the whole matrix."""
        return replace(pairs, vectors=self.support.widen(pairs.vectors))
