"""Inner products and lengths of vectors of millions of entries.

`torch.norm` and dot products on a CPU add float32 terms one after another: of 22 million entries they lose 0.1 %. `sum`
adds in pairs and keeps seven digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

COLUMNS_AT_ONCE = 1 << 12
"""Entries that one float32 matrix product adds up."""


def inner(left: Float[Tensor, " parameters"], right: Float[Tensor, " parameters"]) -> float:
    """`left^T right`."""
    return float((left * right).sum())


def length(vector: Float[Tensor, " parameters"]) -> float:
    """`||vector||`."""
    return math.sqrt(inner(vector, vector))


def unit(vector: Float[Tensor, " parameters"]) -> Float[Tensor, " parameters"]:
    """The vector at length 1; a vector of zeros stays what it is."""
    return vector / (length(vector) or 1.0)


def orthogonality_loss(blocks: Sequence[Float[Tensor, "rows parameters"]]) -> float:
    """Largest entry of `Q Q^T - I` in magnitude, `Q` being the rows of the blocks."""
    products = inner_products(blocks)
    return float((products - torch.eye(len(products), dtype=torch.float64)).abs().max())


def inner_products(blocks: Sequence[Float[Tensor, "rows parameters"]]) -> Float[Tensor, "vectors vectors"]:
    """All inner products of the rows of the blocks, in float64 on the CPU; no copy of the rows is made.

    Args:
        blocks: the vectors, some to a block, in order.
    """
    count, size = sum(len(block) for block in blocks), blocks[0].shape[1]
    total = torch.zeros(count, count, dtype=torch.float64, device=blocks[0].device)
    for start in range(0, size, COLUMNS_AT_ONCE):
        part = torch.cat([block[:, start : start + COLUMNS_AT_ONCE] for block in blocks])
        total += (part @ part.T).double()
    return total.cpu()
