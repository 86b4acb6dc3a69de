"""Curriculum: an order of training pairs in which easy ones come more often at first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rm_optimizer.core.metrics.estimate import finite_array
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.orders import PairOrder

STAGES = ((0.3, (0.5, 0.4, 0.1)), (0.7, (0.2, 0.6, 0.2)), (math.inf, (0.1, 0.5, 0.4)))
"""Shares of easy, medium and hard pairs while the progress, in [0, 1), is below the first number."""
BINS = ("easy", "medium", "hard")


class CurriculumSampler:
    """Positions of training pairs, easy ones more often at first and hard ones later.

    The shares follow the progress of the whole training, also within an epoch. Counts are exact: they sum to the
    epoch's length, and a bin without pairs leaves its share to the others in proportion. A pair is repeated only once
    all of its bin were drawn. Each epoch depends on the seed and its number alone.

    Args:
        margins: strength of each pair's preference; its sign does not count.
        easy_above: margin above which a pair is easy.
        hard_below: margin below which a pair is hard.
        quantiles: True if both thresholds are shares of the pairs in place of margins.
        num_epochs: epochs of the training, positive; a fraction ends within an epoch.
        num_samples: positions of an epoch; None is one for each pair.
        covers: True if every epoch holds every pair once, and the shares decide only when.
        segments: parts of an epoch, in each of which the shares are constant.
        seed: seed of the draws.

    Attributes:
        easy_idx: positions of the easy pairs; `medium_idx` and `hard_idx` hold the others.

    Raises:
        DataError: if there are no margins, or one is not finite.
        ConfigError: if an option is out of its range.

    Example:
        >>> sampler = CurriculumSampler([0.9, 0.8, 0.5, 0.1], num_epochs=1, covers=True, segments=1)
        >>> sorted(sampler)
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        margins: ArrayLike,
        *,
        easy_above: float = 0.7,
        hard_below: float = 0.2,
        quantiles: bool = False,
        num_epochs: float = 1,
        num_samples: int | None = None,
        covers: bool = True,
        segments: int = 10,
        seed: int = 0,
    ) -> None:
        size = np.abs(finite_array(margins, "margins", ["pair"]))
        if not hard_below <= easy_above or (quantiles and not (hard_below >= 0 and easy_above <= 1)):
            shares = ", both in [0, 1]" if quantiles else ""
            raise ConfigError(f"hard_below must not exceed easy_above{shares}, got {hard_below} and {easy_above}")
        if not 0 < num_epochs < math.inf or segments < 1 or (num_samples is not None and num_samples < 1):
            got = f"{num_epochs}, {segments} and {num_samples}"
            raise ConfigError(f"num_epochs, segments and num_samples must be positive, got {got}")
        if covers and num_samples not in (None, len(size)):
            raise ConfigError(f"covers=True takes one position for each of the {len(size)} pairs, got {num_samples}")
        low, high = np.quantile(size, [hard_below, easy_above]) if quantiles else (hard_below, easy_above)
        bins = (size > high, (size <= high) & (size >= low), size < low)
        self.bins: tuple[NDArray[np.int64], ...] = tuple(map(np.flatnonzero, bins))
        self._num_samples = len(size) if num_samples is None else num_samples
        self._num_epochs, self._segments, self._covers, self._seed = num_epochs, segments, covers, seed
        self._epoch, (self.easy_idx, self.medium_idx, self.hard_idx) = 0, self.bins

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions(self._epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives, counted from 0."""
        self._epoch = epoch

    def order(self) -> PairOrder:
        """The order as `train_reward_model(order=…)` takes it."""
        return PairOrder("curriculum", self.positions)

    def positions(self, epoch: int) -> NDArray[np.int64]:
        """Positions of the pairs of an epoch, counted from 0."""
        generator = np.random.default_rng([self._seed, epoch])
        bins, left = [_shuffled(members, generator) for members in self.bins], list(map(len, self.bins))
        ends = np.linspace(0, self._num_samples, self._segments + 1).round().astype(int)
        parts = []
        for segment, num in enumerate(np.diff(ends).tolist()):
            progress = (epoch + segment / self._segments) / self._num_epochs
            room = left if self._covers else [num * bool(len(members)) for members in self.bins]
            counts = exact_counts(shares_at(progress), num, room)
            left = [size - count for size, count in zip(left, counts, strict=True)]
            parts.append(generator.permutation(_taken(bins, counts)))
        return np.concatenate(parts)

    def sample(self, n: int, epoch: int | None = None, total_epochs: float | None = None) -> NDArray[np.int64]:
        """Positions of `n` pairs by the shares of an epoch of the training, drawn anew for each epoch.

        Args:
            n: number of positions, positive; a pair repeats only once all of its bin were drawn.
            epoch: epoch of the training, counted from 0; None takes the shares of its middle.
            total_epochs: epochs of the training; None takes `num_epochs`.

        Raises:
            ConfigError: if a number is not positive.
        """
        last = self._num_epochs if total_epochs is None else total_epochs
        if n < 1 or not last > 0:
            raise ConfigError(f"n and total_epochs must be positive, got {n} and {last}")
        generator = np.random.default_rng([self._seed, 1, *([] if epoch is None else [epoch])])
        room = [n if len(members) else 0 for members in self.bins]
        counts = exact_counts(shares_at(0.5 if epoch is None else epoch / last), n, room)
        # Each bin is shuffled where it is drawn from, which its place among the draws of the generator depends on.
        drawn = [_taken([_shuffled(members, generator)], [num]) for members, num in zip(self.bins, counts, strict=True)]
        return np.asarray(generator.permutation(np.concatenate(drawn)))


def _shuffled(members: NDArray[np.int64], generator: np.random.Generator) -> Iterator[int]:
    """Pairs of a bin in random order, shuffled anew when all were taken."""
    first = generator.permutation(members).tolist()
    return chain(first, chain.from_iterable(generator.permutation(members).tolist() for _ in count()))


def _taken(bins: Sequence[Iterator[int]], counts: Sequence[int]) -> NDArray[np.int64]:
    found = [position for members, num in zip(bins, counts, strict=True) for position in islice(members, num)]
    return np.array(found, dtype=np.int64)


def shares_at(progress: float) -> tuple[float, float, float]:
    """Shares of easy, medium and hard pairs at a progress of the training; the last stage's from 1 on."""
    return next(shares for end, shares in STAGES if progress < end)


def exact_counts(shares: Sequence[float], num: int, room: Sequence[int]) -> list[int]:
    """Integers that sum to `num`, near `num` times the shares, none above its room.

    What does not fit goes to the others in proportion to their shares; rounding goes to the largest remainders.

    Args:
        shares: non-negative, their sum positive over the entries with room.
        num: the sum, at most the sum of `room`.
        room: largest count of each.

    Example:
        >>> exact_counts((0.5, 0.4, 0.1), 10, (10, 0, 10))
        [8, 0, 2]
    """
    ideal = np.zeros(len(shares))
    is_open = np.asarray(room) > 0
    while (rest := num - ideal.sum()) > 1e-9 and is_open.any():
        weights = np.where(is_open, shares, 0.0)
        ideal += rest * weights / weights.sum()
        is_open &= ideal < room
        ideal = np.minimum(ideal, room)
    counts = np.floor(ideal + 1e-9).astype(int)
    remainders = np.where(counts < room, ideal - counts, -1.0)
    for place in np.argsort(-remainders, kind="stable")[: num - counts.sum()]:
        counts[place] += 1
    return [int(count) for count in counts]
