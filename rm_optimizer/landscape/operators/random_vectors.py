"""Random vectors from a seed: the same on every device and in every process."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.base import SymmetricOperator


class RandomVectors:
    """Draws vectors for an operator from one generator on the CPU.

    Args:
        operator: gives length, type and device.
        seed: seed of the draws.
    """

    def __init__(self, operator: SymmetricOperator, seed: int) -> None:
        self._operator = operator
        self._generator = torch.Generator().manual_seed(seed)

    def signs(self, count: int) -> Float[Tensor, "vectors parameters"]:
        """Entries of 1 and -1 with equal probability (Rademacher)."""
        bits = torch.randint(0, 2, (count, self._operator.dimension), generator=self._generator, dtype=torch.int8)
        return (2 * bits - 1).to(self._operator.device, self._operator.dtype)

    def normals(self, count: int) -> Float[Tensor, "vectors parameters"]:
        """Standard normal entries."""
        drawn = torch.randn(count, self._operator.dimension, generator=self._generator)
        return drawn.to(self._operator.device, self._operator.dtype)
