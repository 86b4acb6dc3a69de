"""Pools of labeled pairs to test acquisition functions: synthetic ones with a known oracle, and real pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.special import expit

from rm_optimizer.core.pairs.conversations import conversation_groups
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import DataError
from rm_optimizer.records.files import replacing

NUM_FEATURES, NUM_POOL, NUM_TEST, NUM_PROTOTYPES = 24, 3000, 2000, 100
"""Size of a synthetic pool."""
NOISE = 0.1
"""Deviation of a pair from its prototype in a redundant pool, relative to a feature's standard deviation."""
COPIED_SHARE, NUM_COPIED, COPY_NOISE = 0.9, 2, 0.05
"""Share of copies in a duplicated pool, number of copied pairs, and relative deviation of the copies."""
MARGIN_STD = 2.0
"""Standard deviation of the oracle's margins over independent pairs."""


class SyntheticPool(StrEnum):
    """Pools whose oracle is a linear Bradley-Terry model of Gaussian features with variances 1, 1/2, 1/3, ….

    `iid` has independent pairs. In `redundant` every pair is close to one of 100 prototypes, the r-th with a frequency
    proportional to 1/r; test pairs have the same distribution. `shifted` has the same pool and independent test pairs.
    In `duplicated` nine of ten pairs are near-copies of two pairs, and the others are independent; test pairs have the
    same distribution.
    """

    iid = "iid"
    redundant = "redundant"
    shifted = "shifted"
    duplicated = "duplicated"


@dataclass(frozen=True)
class LabelSplit:
    """A pool of pairs to choose from, with their labels, and pairs to test on.

    Args:
        differences: features of the first response less those of the second, of the pool.
        labels: 1 where the first response of a pair was preferred, else 0.
        test_differences: differences of the test pairs.
        test_chances: probability that the first response of a test pair is preferred.
        lengths: logarithm of the ratio of the first response's length to the other's, in the pool; 0 without texts.
        groups: number of the conversation of each pair in the pool.
    """

    differences: Float[np.ndarray, "pool features"]
    labels: Float[np.ndarray, " pool"]
    test_differences: Float[np.ndarray, "test features"]
    test_chances: Float[np.ndarray, " test"]
    lengths: Float[np.ndarray, " pool"]
    groups: np.ndarray

    def flipped(self, share: float, seed: int) -> LabelSplit:
        """The split with a random share of the pool's labels flipped."""
        is_wrong = np.random.default_rng([seed, 2]).random(len(self.labels)) < share
        return replace(self, labels=np.where(is_wrong, 1 - self.labels, self.labels))


def synthetic_split(pool: SyntheticPool, seed: int, *, margin_std: float = MARGIN_STD) -> LabelSplit:
    """A synthetic pool with labels by its oracle; each seed has its own oracle.

    Args:
        pool: kind of the pool.
        seed: seed of the oracle and the pairs.
        margin_std: standard deviation of the oracle's margins over independent pairs; a large one leaves no noise.
    """
    generator = np.random.default_rng([seed, 0])
    scales = np.arange(1, NUM_FEATURES + 1) ** -0.5
    weights = generator.normal(size=NUM_FEATURES)
    weights *= margin_std / np.linalg.norm(weights * scales)
    prototypes = generator.normal(size=(NUM_PROTOTYPES, NUM_FEATURES)) * scales
    often = 1 / np.arange(1, NUM_PROTOTYPES + 1)

    def near_prototypes(num: int) -> np.ndarray:
        drawn = prototypes[generator.choice(NUM_PROTOTYPES, size=num, p=often / often.sum())]
        return np.asarray(drawn + NOISE * scales * generator.normal(size=drawn.shape))

    def independent(num: int) -> np.ndarray:
        return np.asarray(generator.normal(size=(num, NUM_FEATURES)) * scales)

    def with_copies(num: int) -> np.ndarray:
        copied = prototypes[generator.integers(NUM_COPIED, size=num)]
        copied = copied + COPY_NOISE * scales * generator.normal(size=copied.shape)
        return np.where(generator.random((num, 1)) < COPIED_SHARE, copied, independent(num))

    drawn, tested = {
        SyntheticPool.iid: (independent, independent),
        SyntheticPool.redundant: (near_prototypes, near_prototypes),
        SyntheticPool.shifted: (near_prototypes, independent),
        SyntheticPool.duplicated: (with_copies, with_copies),
    }[pool]
    differences, test = drawn(NUM_POOL), tested(NUM_TEST)
    labels = (generator.random(NUM_POOL) < expit(differences @ weights)).astype(float)
    return LabelSplit(differences, labels, test, expit(test @ weights), np.zeros(NUM_POOL), np.arange(NUM_POOL))


def digest_of(features: Path | None) -> str | None:
    """SHA-256 of a file of `LabeledFeatures`, which distinguishes trials on different pairs; None without a file."""
    return None if features is None else hashlib.sha256(features.read_bytes()).hexdigest()


@dataclass(frozen=True)
class LabeledFeatures:
    """Real pairs as features.

    Args:
        differences: features of the chosen response less those of the rejected one.
        groups: number of each pair's conversation; splits keep a conversation on one side.
        lengths: logarithm of the ratio of the chosen response's length to the rejected one's.
    """

    differences: Float[np.ndarray, "pairs features"]
    groups: np.ndarray
    lengths: Float[np.ndarray, " pairs"]

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair], differences: Float[np.ndarray, "pairs features"]) -> LabeledFeatures:
        """Features of these pairs, which must be plain preferences.

        Raises:
            DataError: if a label is not 1.
        """
        for number, pair in enumerate(pairs):
            if pair.label != 1:
                raise DataError(
                    f"pair {number + 1} has the label {pair.label}; a study compares plain preferences, so leave out "
                    "pairs whose label is not 1"
                )
        numbers: dict[int, int] = {}
        found = conversation_groups([pair.prompt for pair in pairs])
        groups = np.array([numbers.setdefault(group, len(numbers)) for group in found])
        return cls(differences, groups, np.array([np.log(len(p.chosen)) - np.log(len(p.rejected)) for p in pairs]))

    def write(self, path: Path) -> None:
        """Write the features into an `.npz` file, completely or not at all."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **vars(self))

    @classmethod
    def read(cls, path: Path) -> LabeledFeatures:
        """The features of a file that `write` made."""
        with np.load(path) as arrays:
            return cls(**arrays)

    def split(self, seed: int, *, test_share: float = 0.3) -> LabelSplit:
        """Random split of the conversations into pool and test, with each pair's responses in random order."""
        num_groups = int(self.groups.max()) + 1
        tested = np.isin(self.groups, random_positions(num_groups, round(test_share * num_groups), [seed, 0]))
        differences, labels = self.turned(seed)
        lengths = self.lengths * (2 * labels - 1)
        kept = (lengths[~tested], self.groups[~tested])
        return LabelSplit(differences[~tested], labels[~tested], differences[tested], labels[tested], *kept)

    def turned(self, seed: int) -> tuple[Float[np.ndarray, "pairs features"], Float[np.ndarray, " pairs"]]:
        """Differences with each pair's responses in random order, and 1 where the chosen one comes first, else 0."""
        first = np.random.default_rng([seed, 1]).integers(0, 2, size=len(self.groups)).astype(float)
        return self.differences * (2 * first - 1)[:, None], first
