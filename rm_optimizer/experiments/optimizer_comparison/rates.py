"""Learning rates tried for each optimizer: a grid in half decades, extended if the best rate is at an edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rm_optimizer.records.codec import JsonRecord

HALF_DECADE = math.sqrt(10.0)
"""Factor from one rate to the next."""
MOST_EXTRA = 2
"""Most rates that are added beyond the edges of the grid."""


@dataclass(frozen=True, kw_only=True)
class ChosenRate(JsonRecord):
    """The learning rate that tuning chose.

    Args:
        rate: learning rate; None if every run of every rate diverged.
        nll: mean validation NLL of its tuning runs, which is biased low because the rate was chosen by it.
        at_edge: True if the rate is the smallest or largest one tried, so that a better one may lie beyond.
        extra: number of rates added beyond the grid.
    """

    rate: float | None
    nll: float
    at_edge: bool
    extra: int


def rate_grid(center: float, count: int) -> tuple[float, ...]:
    """Learning rates in half decades around a center, to three digits.

    Args:
        center: rate of the preset.
        count: number of rates, odd.

    Example:
        >>> rate_grid(1e-4, 3)
        (3.16e-05, 0.0001, 0.000316)
    """
    return tuple(_rounded(center * HALF_DECADE**power) for power in range(-(count // 2), count // 2 + 1))


def next_rate(scores: Mapping[float, float], grid: Sequence[float]) -> float | None:
    """The next rate to try beyond an edge if the best rate is at that edge; None if none is to be tried.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        grid: rates of the first grid.
    """
    tried = sorted(scores)
    best = min(tried, key=lambda rate: scores[rate])
    if len(tried) - len(grid) >= MOST_EXTRA or math.isinf(scores[best]):
        return None
    if best == tried[0]:
        return _rounded(best / HALF_DECADE)
    return _rounded(best * HALF_DECADE) if best == tried[-1] else None


def chosen_rate(scores: Mapping[float, float], grid: Sequence[float]) -> ChosenRate:
    """The rate with the smallest mean validation NLL, or the smaller of two equally good ones.

    Args:
        scores: mean validation NLL of each rate that was tried; infinite if a run diverged.
        grid: rates of the first grid.
    """
    tried = sorted(scores)
    best = min(tried, key=lambda rate: scores[rate])
    is_known = math.isfinite(scores[best])
    return ChosenRate(
        rate=best if is_known else None,
        nll=scores[best] if is_known else math.nan,
        at_edge=is_known and best in (tried[0], tried[-1]),
        extra=len(tried) - len(grid),
    )


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
