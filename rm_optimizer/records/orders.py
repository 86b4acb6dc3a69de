"""Orders and draws of pairs: functions of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PairOrder:
    """Order in which the epochs visit the training pairs, in place of the shuffle by the seed.

    Args:
        name: name of the order, which the run's record keeps.
        positions: positions of the pairs of an epoch, counted from 0 in the data set; a pure function of the epoch,
            counted from 0. A pair may occur more than once, but there are as many positions as pairs.

    Example:
        >>> PairOrder("reversed", lambda epoch: range(3)[::-1]).identity
        'reversed-b3db6650e4598ca5'
    """

    name: str
    positions: Callable[[int], Sequence[int] | NDArray[np.int64]]

    @property
    def identity(self) -> str:
        """Name, and digest of the first epoch."""
        first = np.asarray(self.positions(0), dtype="<i8")
        return f"{self.name}-{hashlib.sha256(first.tobytes()).hexdigest()[:16]}"


def epoch_order(num: int, seed: int, epoch: int, *window: int) -> NDArray[np.int64]:
    """The order of the pairs or blocks in one epoch, or in one window of it, a pure function of its arguments.

    Positions are sorted by raw 64-bit PCG64 words seeded with ``(seed, epoch, *window)``, none negative. NumPy promises
    the raw stream, unlike `Generator.permutation`, to stay the same from version to version (NEP 19).
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, epoch, *window])).random_raw(num), kind="stable")


def random_positions(num: int, num_drawn: int, seed: int | Sequence[int]) -> NDArray[np.int64]:
    """Positions below `num` drawn without replacement, ascending; all of them where `num_drawn` is not smaller.

    With one seed, a smaller draw lies within every larger one.
    """
    return np.sort(np.random.default_rng(seed).permutation(num)[:num_drawn]).astype(np.int64)
