"""Groups of sequences whose common first tokens are computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.tokens.prefix_trees import shared_length

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
