"""Margins of pairs: training dynamics, labels that are probably wrong, and the curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import expit, log_expit

from rm_optimizer.core.metrics.calibration import flipped_labels
from rm_optimizer.core.pairs.orders import CurriculumSampler as CurriculumSampler
from rm_optimizer.data_efficiency.linear_reward import fit_linear_reward
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.codec import JsonRecord

RIDGES = tuple(float(ridge) for ridge in 10.0 ** np.arange(-2.0, 4.1, 0.5))
"""Penalties to choose from, for differences of features with unit variance."""


@dataclass(frozen=True)
class Cartography:
    """Training dynamics of pairs (dataset cartography; Swayamdipta et al., 2020, arXiv:2009.10795).

    Args:
        chances: probability of each pair's own label after each epoch, or by each model.

    Raises:
        DataError: if one is no probability.
    """

    chances: Float[np.ndarray, "epochs pairs"]

    def __post_init__(self) -> None:
        if not ((self.chances >= 0) & (self.chances <= 1)).all():
            raise DataError(
                "training dynamics need a probability in [0, 1] of every pair (column) in every epoch (row)"
            )

    @property
    def confidence(self) -> Float[np.ndarray, " pairs"]:
        """Mean over epochs of the label's probability.

        Low for pairs that are hard to learn and for wrong labels.
        """
        return np.asarray(self.chances.mean(axis=0))

    @property
    def variability(self) -> Float[np.ndarray, " pairs"]:
        """Standard deviation over epochs; high for ambiguous pairs."""
        return np.asarray(self.chances.std(axis=0))

    @property
    def correctness(self) -> Float[np.ndarray, " pairs"]:
        """Share of epochs in which the label is the more probable answer.

        A tie counts half.
        """
        return np.asarray((self.chances > 0.5).mean(axis=0) + 0.5 * (self.chances == 0.5).mean(axis=0))


@dataclass(frozen=True)
class SuspectedLabels(JsonRecord):
    """Labels below a threshold of probability.

    Args:
        positions: positions of the pairs, the least probable label first.
        threshold: probability of the label below which a pair is suspected.
        false_positive_rate: estimated share of right labels that are suspected.
        num_wrong: expected number of wrong labels among the suspected ones.
        flipped_share: estimated share of all labels that are wrong.
    """

    positions: tuple[int, ...]
    threshold: float
    false_positive_rate: float
    num_wrong: float
    flipped_share: float


def held_out_chances(
    differences: Float[np.ndarray, "pairs features"],
    label: Float[np.ndarray, " pairs"],
    groups: np.ndarray,
    *,
    num_folds: int = 5,
    num_repeats: int = 4,
    seed: int = 0,
) -> Cartography:
    """Probability of each pair's label by linear models fitted without its conversation, one row for each repeat.

    Each repeat divides the conversations into folds at random. Its penalty is the one with the lowest held-out NLL, so
    that the probabilities are neither over- nor under-confident.

    Args:
        differences: features of the first response less those of the second.
        label: probability that the first response is better.
        groups: number of each pair's conversation.
        num_folds: number of folds; each is predicted by a model fitted to the others.
        num_repeats: number of divisions into folds.
        seed: seed of the divisions.

    Raises:
        DataError: if there are fewer conversations than folds.
    """
    chances = np.zeros((num_repeats, len(label)))
    for repeat in range(num_repeats):
        best, _ = held_out_margins(differences, label, groups, num_folds=num_folds, seed=[seed, repeat])
        chances[repeat] = label * expit(best) + (1 - label) * expit(-best)
    return Cartography(chances)


def held_out_margins(
    differences: Float[np.ndarray, "pairs features"],
    label: Float[np.ndarray, " pairs"],
    groups: np.ndarray,
    *,
    num_folds: int,
    seed: Sequence[int],
) -> tuple[Float[np.ndarray, " pairs"], float]:
    """Margins by models fitted without the pair's conversation, and the penalty, which has the lowest held-out NLL.

    Args:
        differences: features of the first response less those of the second.
        label: probability that the first response is better.
        groups: number of each pair's conversation.
        num_folds: number of folds; each is predicted by a model fitted to the others.
        seed: seed of the division.

    Raises:
        DataError: if there are fewer conversations than folds.
    """
    members, numbers = np.unique(groups, return_inverse=True)
    if len(members) < num_folds:
        raise DataError(f"held-out predictions need at least {num_folds} conversations, got {len(members)}")
    scaled = scaled_features(differences)
    fold = np.random.default_rng(seed).permutation(len(members)) % num_folds
    margins = np.zeros((len(RIDGES), len(label)))
    for held in range(num_folds):
        is_held = fold[numbers] == held
        for row, ridge in enumerate(RIDGES):
            weights = fit_linear_reward(scaled[~is_held], label[~is_held], ridge=ridge)
            margins[row, is_held] = scaled[is_held] @ weights
    nll = -(label * log_expit(margins) + (1 - label) * log_expit(-margins)).mean(axis=1)
    best = int(np.argmin(nll))
    return margins[best], RIDGES[best]


def scaled_features(
    differences: Float[np.ndarray, "pairs features"], like: Float[np.ndarray, "others features"] | None = None
) -> Float[np.ndarray, "pairs features"]:
    """Differences with each feature divided by its root mean square over these or other pairs.

    Args:
        differences: features of the first response less those of the second.
        like: differences of the pairs that the root mean square is taken over; None takes `differences`.
    """
    rows = differences if like is None else like
    return np.asarray(differences / np.maximum(np.sqrt((rows**2).mean(axis=0)), 1e-12))


def suspected_labels(chances: Float[np.ndarray, " pairs"], *, false_positive_rate: float = 0.05) -> SuspectedLabels:
    """Labels to check again: those that are more probably flipped than not.

    The expected share of right labels that are suspected is the sum of the probabilities of being right over the
    suspected pairs, divided by the sum over all pairs. The least probable labels are suspected first, as many as keep
    this share within the rate.

    Args:
        chances: probability of each pair's label by a model that was not trained on it.
        false_positive_rate: largest share of right labels to suspect, in (0, 1).

    Raises:
        ConfigError: if the rate is not in (0, 1).
    """
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"false_positive_rate must lie in (0, 1), got {false_positive_rate}")
    flipped = flipped_labels(chances)
    order = np.argsort(chances, kind="stable")
    right = np.cumsum(1 - flipped.chances[order])
    num = int(np.searchsorted(right, false_positive_rate * right[-1], side="right"))
    num = min(num, int(np.sum(flipped.chances > 0.5)))
    suspects = order[:num]
    return SuspectedLabels(
        tuple(suspects.tolist()),
        threshold=float(chances[order[num]]) if num < len(order) else 1.0,
        false_positive_rate=float((1 - flipped.chances[suspects]).sum() / right[-1]),
        num_wrong=float(flipped.chances[suspects].sum()),
        flipped_share=flipped.share,
    )


def turned(
    differences: Float[np.ndarray, "pairs features"], seed: int
) -> tuple[Float[np.ndarray, "pairs features"], Float[np.ndarray, " pairs"]]:
    """Differences with each pair's responses in random order, and 1 where the chosen one comes first, else 0.

    Args:
        differences: features of the chosen response less those of the rejected one.
        seed: seed of the order.
    """
    first = np.random.default_rng([seed, 1]).integers(0, 2, size=len(differences)).astype(float)
    return differences * (2 * first - 1)[:, None], first
