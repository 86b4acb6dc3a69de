"""Orders and draws of pairs: pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_pairs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the pairs in one epoch, a pure function of its arguments.

    Positions are sorted by raw 64-bit PCG64 words seeded with ``(seed, epoch)``, neither negative. NumPy promises the
    raw stream, unlike `Generator.permutation`, to stay the same from version to version (NEP 19).
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_pairs)
    return np.argsort(words, kind="stable")


def random_positions(num: int, num_drawn: int, seed: int | Sequence[int]) -> NDArray[np.int64]:
    """Positions below `num` drawn without replacement, ascending; all of them where `num_drawn` is not smaller.

    With one seed, a smaller draw lies within every larger one.
    """
    return np.sort(np.random.default_rng(seed).permutation(num)[:num_drawn]).astype(np.int64)
