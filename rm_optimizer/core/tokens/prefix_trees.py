"""Shared-prompt packing: each prompt once with all its responses after it, and several prompts in a row.

In a causal model, a token's hidden state does not depend on later tokens, so the common first tokens of two sequences
need to be computed only once. A row contains trees of a prefix and the branches that continue it. Each branch attends
to the prefix and to itself, and its positions continue the prefix. Rewards and gradients equal the ones of the separate
sequences (as in flash-preference, li-plus, 2025; here with any attention that accepts a mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def tree_runs(sequences: Sequence[NDArray[np.int32]], group: Sequence[int], most_tokens: int) -> list[list[int]]:
    """A group of sequences with a common start, in runs that each make a tree of at most `most_tokens` tokens.

    A longer sequence is alone. The limit saves time, since a row's attention costs the square of its width.
    """
    runs = list[list[int]]()
    depth = total = 0
    for index in group:
        length = len(sequences[index])
        if runs:
            shared = min(depth, shared_length(sequences[runs[-1][0]], sequences[index]))
            if total + length - len(runs[-1]) * shared <= most_tokens:
                runs[-1].append(index)
                depth, total = shared, total + length
                continue
        runs.append([index])
        depth, total = length - 1, length
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


def common_runs(sequences: Sequence[NDArray[np.int32]], most_tokens: int) -> list[tuple[list[int], int]]:
    """Indices of sequences in `tree_runs` of the groups of `common_starts`, each run with the tokens of its tree."""
    runs = [run for group in common_starts(sequences) for run in tree_runs(sequences, group, most_tokens)]
    return [(run, prefix_tree([sequences[i] for i in run]).num_tokens) for run in runs]
