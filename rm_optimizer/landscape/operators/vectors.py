"""Random vectors from a seed, and inner products and lengths of vectors of millions of entries.

`torch.norm` and dot products on a CPU add float32 terms one after another, and lose 0.1 % with 22 million entries.
`sum` adds in pairs and keeps seven digits. Matrix products keep them too if they sum short runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.operators.parameters import ENTRIES_AT_ONCE

RUN = 1 << 11
"""Number of entries that one float32 product sums."""


def inner(left: Float[Tensor, " parameters"], right: Float[Tensor, " parameters"]) -> float:
    """`left^T right`."""
    parts = [
        (a * b).sum()
        for a, b in zip(torch.split(left, ENTRIES_AT_ONCE), torch.split(right, ENTRIES_AT_ONCE), strict=True)
    ]
    return float(torch.stack(parts).double().sum())


def length(vector: Float[Tensor, " parameters"]) -> float:
    """`||vector||`."""
    return math.sqrt(inner(vector, vector))


def unit(vector: Float[Tensor, " parameters"]) -> Float[Tensor, " parameters"]:
    """The vector scaled to length 1; a vector of zeros is returned unchanged."""
    return vector / (length(vector) or 1.0)


def orthogonality_loss(blocks: Sequence[Float[Tensor, "_ parameters"]]) -> float:
    """Largest entry of `Q Q^T - I` in magnitude, `Q` being the rows of the blocks."""
    gram = gram_matrix(blocks)
    return float((gram - torch.eye(len(gram), dtype=torch.float64)).abs().max())


def gram_matrix(blocks: Sequence[Float[Tensor, "_ parameters"]]) -> Float[Tensor, "vectors vectors"]:
    """All inner products of the rows of the blocks, in float64 on the CPU; no copy of the rows is made."""
    ends = torch.tensor([0, *(len(block) for block in blocks)]).cumsum(dim=0).tolist()
    gram = torch.zeros(ends[-1], ends[-1], dtype=torch.float64)
    for i, left in enumerate(blocks):
        for j, right in enumerate(blocks[: i + 1]):
            part = pairwise_inner(left, right).cpu()
            gram[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = part
            gram[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = part.T
    return gram


def pairwise_inner(
    left: Float[Tensor, "left parameters"], right: Float[Tensor, "right parameters"]
) -> Float[Tensor, "left right"]:
    """`left right^T` in float64; runs of entries are summed in the vectors' own type."""
    whole = left.shape[1] // RUN * RUN
    left_runs, right_runs = (rows[:, :whole].view(len(rows), -1, RUN).transpose(0, 1) for rows in (left, right))
    total: Tensor = (left_runs @ right_runs.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return total + (left[:, whole:] @ right[:, whole:].T).double()


class RandomVectors:
    """Vectors for an operator from one generator on the CPU: the same on every device and in every process.

    Args:
        operator: operator that determines length, type and device.
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
