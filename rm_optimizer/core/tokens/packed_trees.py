"""Trees of sequences with shared starts as tensors: several in a row, with the positions and ends for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.core.tokens.plan import assign_rows
from rm_optimizer.core.tokens.prefix_trees import PrefixTree


@dataclass(frozen=True)
class PackedTrees:
    """Trees in rows.

    Args:
        input_ids: token ids, `(rows, tokens)`.
        position_ids: positions, which start at 0 in each tree and continue the prefix in each branch.
        end: first later column that does not attend to the token. It is the end of the tree for a token of the prefix,
            of the branch for a token of a branch, and of the row for padding.
        last: flat index `row * tokens + column` of the last token of each sequence, tree by tree.
        num_tokens: number of tokens in the rows, without padding.
        num_sequence_tokens: number of tokens of the separate sequences.
    """

    input_ids: Int[Tensor, "rows tokens"]
    position_ids: Int[Tensor, "rows tokens"]
    end: Int[Tensor, "rows tokens"]
    last: Int[Tensor, " sequences"]
    num_tokens: int
    num_sequence_tokens: int

    @property
    def num_padded_tokens(self) -> int:
        """Number of tokens in the rows, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedTrees:
        """The same on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedTrees:
        """The same in page-locked memory."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> PackedTrees:
        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            end=move(self.end),
            last=move(self.last),
        )


def pack_trees(trees: Sequence[PrefixTree], *, pad_token_id: int) -> PackedTrees:
    """Pack trees into rows as wide as the largest one; `last` has the order of the given trees."""
    sizes = [tree.num_tokens for tree in trees]
    rows, width = assign_rows(sizes), max(sizes)
    ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    position = np.zeros_like(ids)
    end = np.full(ids.shape, width, dtype=np.int32)
    last: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(trees)
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            ends = _write(trees[index], start, ids[row], position[row], end[row])
            last[index] = row * width + ends - 1
            start += sizes[index]
    return PackedTrees(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position),
        end=torch.from_numpy(end),
        last=torch.from_numpy(np.concatenate(last)),
        num_tokens=sum(sizes),
        num_sequence_tokens=sum(tree.num_sequence_tokens for tree in trees),
    )


def _write(
    tree: PrefixTree, start: int, ids: NDArray[np.int64], position: NDArray[np.int64], end: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Write a tree into a row from column `start` on, and return the column after each branch."""
    depth = len(tree.prefix)
    ids[start : start + depth] = tree.prefix
    position[start : start + depth] = np.arange(depth)
    end[start : start + depth] = start + tree.num_tokens
    stops = start + depth + np.cumsum([len(branch) for branch in tree.branches])
    for branch, stop in zip(tree.branches, stops.tolist(), strict=True):
        inside = slice(stop - len(branch), stop)
        ids[inside] = branch
        position[inside] = np.arange(depth, depth + len(branch))
        end[inside] = stop
    return stops
