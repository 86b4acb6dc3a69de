"""Shared-prompt packing: each prompt once with all its responses after it, and several prompts in a row.

In a causal model, a token's hidden state does not depend on later tokens, so the common first tokens of two sequences
need to be computed only once. A row contains trees of a prefix and the branches that continue it. Each branch attends
to the prefix and to itself, and its positions continue the prefix. Rewards and gradients equal those of the separate
sequences (as in flash-preference, li-plus, 2025; here with any attention that accepts a mask).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.core.tokens.plan import assign_rows

TREE_TOKENS = 1024
"""Most tokens of a tree of many branches; on a CPU with 12M parameters, a token costs 1.3 times as much as with 128."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Token sequences with a common prefix, and a branch for the rest of each.

    Args:
        prefix: common first tokens of all sequences; may be empty.
        branches: continuation of each sequence, never empty.
    """

    prefix: NDArray[np.int32]
    branches: tuple[NDArray[np.int32], ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tree."""
        return len(self.prefix) + sum(map(len, self.branches))

    @property
    def num_sequence_tokens(self) -> int:
        """Number of tokens of the separate sequences."""
        return self.num_tokens + (len(self.branches) - 1) * len(self.prefix)


def shared_length(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of common first tokens of two sequences, without the last token of either.

    Example:
        >>> shared_length(np.array([1, 2, 3], np.int32), np.array([1, 2, 3, 4], np.int32))
        2
    """
    shortest = min(len(first), len(second)) - 1
    differ = first[:shortest] != second[:shortest]
    place = int(differ.argmax()) if shortest else 0
    return place if shortest and differ[place] else shortest


def prefix_tree(sequences: Sequence[NDArray[np.int32]]) -> PrefixTree:
    """The sequences as one tree, with the longest common prefix that leaves each of them at least its last token.

    Example:
        >>> tree = prefix_tree([np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)])
        >>> tree.prefix.tolist(), [branch.tolist() for branch in tree.branches]
        ([1, 2], [[3], [4, 5]])
    """
    first = sequences[0]
    depth = min((shared_length(first, other) for other in sequences[1:]), default=len(first) - 1)
    return PrefixTree(first[:depth], tuple(sequence[depth:] for sequence in sequences))


def tree_groups(
    sequences: Sequence[NDArray[np.int32]], groups: Sequence[Sequence[int]], most_tokens: int
) -> list[list[int]]:
    """Groups of sequences with a common start, divided into runs that each make a tree of at most `most_tokens` tokens.

    A longer sequence is alone. The limit saves time, since a row's attention costs the square of its width.
    """
    runs: list[list[int]] = []
    for group in groups:
        run: list[int] = []
        for index in group:
            if run and prefix_tree([sequences[i] for i in (*run, index)]).num_tokens > most_tokens:
                runs.append(run)
                run = []
            run.append(index)
        runs.append(run)
    return runs


LEAST_SHARED = 32
"""Least number of common tokens for which a separate pass saves time."""


def common_starts(sequences: Sequence[NDArray[np.int32]]) -> list[list[int]]:
    """Indices of the sequences in groups that share at least `LEAST_SHARED` first tokens; others are alone.

    In lexicographic order, sequences with the longest common starts are neighbors. The next sequence joins a group
    unless it would shorten the group's common start by more than half, such as another prompt after the same system
    message.

    Example:
        >>> prompt = list(range(40))
        >>> common_starts([np.array(ids, np.int32) for ids in ([*prompt, 7, 7], [9, 9], [*prompt, 8])])
        [[0, 2], [1]]
    """
    # Big-endian, so that the order of the bytes is the order of the token ids; not so with "<u4".
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes())
    groups: list[list[int]] = []
    depth = 0
    for index in order:
        shared = shared_length(sequences[groups[-1][-1]], sequences[index]) if groups else 0
        if shared >= max(LEAST_SHARED, depth / 2):
            groups[-1].append(index)
            depth = min(depth or shared, shared)
        else:
            groups.append([index])
            depth = 0
    return groups


def unique_tokens(sequences: Sequence[NDArray[np.int32]]) -> int:
    """Number of tokens of the sequences, where the common start of a group counts once."""
    total = sum(map(len, sequences))
    for group in common_starts(sequences):
        if len(group) > 1:
            depth = min(shared_length(sequences[group[0]], sequences[index]) for index in group[1:])
            total -= depth * (len(group) - 1)
    return total


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
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


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
