"""Plans of batches: shares of ranks, and groups of sequences within a token budget."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PASS_TOKENS = 256
"""Assumed cost of a further forward and backward pass, in tokens, for the choice of the batches."""


def rank_share(
    tokens: NDArray[np.integer], indices: NDArray[np.int64], rank: int, world_size: int
) -> NDArray[np.int64]:
    """One rank's pairs of a macro-batch; the shares are disjoint, complete and nearly equal in tokens.

    The longest pair is assigned first, each to the rank with the fewest tokens so far (Graham's LPT rule, 1969: at most
    4/3 of the best largest share).

    Args:
        tokens: number of tokens to compute for each pair of the macro-batch.
        indices: the pairs, in the same order.
        rank: rank of the process.
        world_size: number of ranks.
    """
    loads = [(0, r) for r in range(world_size)]
    share: list[int] = []
    for position in np.argsort(-tokens, kind="stable").tolist():
        load, least = loads[0]
        heapq.heapreplace(loads, (load + int(tokens[position]), least))
        if least == rank:
            share.append(position)
    return indices[np.asarray(share, dtype=np.int64)]


def length_batches(lengths: Sequence[int] | NDArray[np.integer], token_budget: int) -> list[list[int]]:
    """Indices of the sequences in batches of similar length, longest first, at the least total cost.

    Within a batch, ``sequences x longest <= token_budget``; a sequence longer than the budget is alone. So memory peaks
    at the first batch. Of all ways to divide the sorted sequences, the chosen one has the least cost in tokens, padding
    included, with `PASS_TOKENS` added for every batch. O(n log n) for n sequences.

    Raises:
        ValueError: if the budget is not positive.

    Example:
        >>> length_batches([3, 9, 4, 3], token_budget=9)
        [[1], [2], [0, 3]]
        >>> length_batches([900, 100, 100, 800], token_budget=4000)
        [[0, 3], [1, 2]]
    """
    _check_budget(token_budget)
    widths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-widths, kind="stable")
    return [order[start:end].tolist() for start, end in pairwise(_cheapest_cuts(widths[order], token_budget))]


def _cheapest_cuts(widths: NDArray[np.int64], token_budget: int) -> list[int]:
    """Ends of consecutive batches of descending widths, after 0, at the least total cost.

    Dynamic programming from the end, ``cost(s) = min_e  (e - s) widths[s] + PASS_TOKENS + cost(e)`` over the ends `e`
    that the budget allows; of equally good ends, the latest is chosen. Since widths descend, an end that costs less
    than a later one for some start costs less for every earlier start. So one queue of ends, each with the last start
    for which it is the best, is enough (Galil & Park, 1992, "Dynamic programming with convexity, concavity and
    sparsity"). O(n log n).
    """
    num = len(widths)
    allowed = np.minimum(np.arange(num) + np.maximum(token_budget // np.maximum(widths, 1), 1), num)
    too_far: list[int] = (np.searchsorted(allowed, np.arange(num + 1)) - 1).tolist()
    width: list[int] = widths.tolist()
    ascending: list[int] = (-widths).tolist()
    cost, end = [0] * (num + 1), [0] * num

    def overtakes(near: int, far: int) -> int:
        """Last start from which the nearer end costs less than the farther one."""
        wider = bisect_left(ascending, -((cost[near] - cost[far]) // (far - near)))
        return max(too_far[far], wider - 1)

    # Entries are an end and the last start for which it is best, farthest end first. Starts descend: the left end is
    # best now, and each further one from its own start on. A nearer end is added on the right after the removal of
    # those that it overtakes before they are ever best.
    ends: deque[tuple[int, int]] = deque()
    for start in range(num - 1, -1, -1):
        near, since = start + 1, num
        while ends and (since := overtakes(near, ends[-1][0])) >= ends[-1][1]:
            ends.pop()
        ends.append((near, since if ends else num))
        while len(ends) > 1 and ends[1][1] >= start:
            ends.popleft()
        best = end[start] = ends[0][0]
        cost[start] = (best - start) * width[start] + PASS_TOKENS + cost[best]
    cuts = [0]
    while cuts[-1] < num:
        cuts.append(end[cuts[-1]])
    return cuts


def _check_budget(token_budget: int) -> None:
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")


class _Stock:
    """Items by size, from which the largest one that fits is taken in O(log n), or the first of equally large ones."""

    def __init__(self, sizes: Sequence[int] | NDArray[np.integer]) -> None:
        self._piles: dict[int, list[int]] = {}
        for index in range(len(sizes) - 1, -1, -1):
            self._piles.setdefault(int(sizes[index]), []).append(index)
        self._sizes = sorted(self._piles)

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def fill_row(self, room: int) -> list[int]:
        """Take the largest item that fits until none does, and return the taken ones."""
        row = []
        while place := bisect_right(self._sizes, room):
            size = self._sizes[place - 1]
            row.append(self._piles[size].pop())
            room -= size
            if not self._piles[size]:
                del self._piles[size], self._sizes[place - 1]
        return row


def assign_rows(sizes: Sequence[int] | NDArray[np.integer]) -> list[list[int]]:
    """Items in rows as wide as the largest item; each row is filled with the largest item that still fits.

    Example:
        >>> assign_rows([5, 9, 4, 3])
        [[1], [0, 2], [3]]
    """
    stock = _Stock(sizes)
    width = stock.largest if stock else 0
    rows = []
    while stock:
        rows.append(stock.fill_row(width))
    return rows


def row_batches(sizes: Sequence[int] | NDArray[np.integer], token_budget: int) -> list[list[int]]:
    """Items in batches that `assign_rows` packs into ``rows x width <= token_budget`` tokens, widest first.

    Each row of a batch starts with the largest remaining item and is filled with smaller ones. A batch ends early if
    all remaining items fit into rows of half the width, since a row's attention costs the square of its width. An item
    larger than the budget has a batch with one row. O(n log n).

    Args:
        sizes: number of tokens of each item, positive.
        token_budget: most tokens of a batch, padding included.

    Raises:
        ValueError: if the budget is not positive.

    Example:
        >>> row_batches([5, 9, 4, 3], token_budget=9)
        [[1], [0], [2, 3]]
        >>> row_batches([5, 9, 4, 3], token_budget=18)
        [[1, 0, 2], [3]]
    """
    _check_budget(token_budget)
    stock = _Stock(sizes)
    batches = []
    while stock:
        width = stock.largest
        batch = stock.fill_row(width)
        for _ in range(token_budget // width - 1):
            if stock and 2 * stock.largest > width:
                batch += stock.fill_row(width)
        batches.append(batch)
    return batches
