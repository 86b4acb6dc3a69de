"""Pairs that are probably labeled wrong: predictions of models that have not seen them, and training dynamics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit, log_expit

from rm_optimizer.core.pairs.orders import random_positions
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
    """

    chances: Float[np.ndarray, "epochs pairs"]

    def __post_init__(self) -> None:
        if not np.isfinite(self.chances).all():
            raise DataError("training dynamics need a finite probability of every pair in every epoch")

    @property
    def confidence(self) -> Float[np.ndarray, " pairs"]:
        """Mean over epochs of the label's probability; low for pairs that are hard to learn, and for wrong labels."""
        return np.asarray(self.chances.mean(axis=0))

    @property
    def variability(self) -> Float[np.ndarray, " pairs"]:
        """Standard deviation over epochs; high for ambiguous pairs."""
        return np.asarray(self.chances.std(axis=0))

    @property
    def correctness(self) -> Float[np.ndarray, " pairs"]:
        """Share of epochs in which the label is the more probable answer; a tie counts half."""
        return np.asarray((self.chances > 0.5).mean(axis=0) + 0.5 * (self.chances == 0.5).mean(axis=0))


@dataclass(frozen=True)
class SuspectedLabels(JsonRecord):
    """Labels that a threshold calls wrong.

    Args:
        positions: pairs, the least probable label first.
        threshold: probability of the label below which a pair is suspected.
        false_positive_rate: estimated share of the right labels that is suspected.
        num_wrong: expected wrong labels among those suspected.
    """

    positions: tuple[int, ...]
    threshold: float
    false_positive_rate: float
    num_wrong: float


def held_out_chances(
    differences: Float[np.ndarray, "pairs features"],
    label: Float[np.ndarray, " pairs"],
    groups: np.ndarray,
    *,
    num_folds: int = 5,
    num_repeats: int = 4,
    seed: int = 0,
) -> Cartography:
    """Probability of each pair's label by linear models that were fitted without its conversation, one row a repeat.

    Each repeat divides the conversations into folds anew. Its penalty is the one with the lowest held-out NLL, so that
    the probabilities are neither too sure nor too doubtful.

    Args:
        differences: features of the first response less those of the second.
        label: probability that the first response is the better one.
        groups: number of each pair's conversation.
        num_folds: parts, each predicted by a model of the others.
        num_repeats: divisions into folds.
        seed: seed of the divisions.

    Raises:
        DataError: if there are fewer conversations than folds.
    """
    members, numbers = np.unique(groups, return_inverse=True)
    if len(members) < num_folds:
        raise DataError(f"held-out predictions need at least {num_folds} conversations, got {len(members)}")
    scaled = differences / np.maximum(np.sqrt((differences**2).mean(axis=0)), 1e-12)
    chances = np.zeros((num_repeats, len(label)))
    for repeat in range(num_repeats):
        fold = np.random.default_rng([seed, repeat]).permutation(len(members)) % num_folds
        margins = np.zeros((len(RIDGES), len(label)))
        for held in range(num_folds):
            is_held = fold[numbers] == held
            for row, ridge in enumerate(RIDGES):
                model = fit_linear_reward(scaled[~is_held], label[~is_held], ridge=ridge)
                margins[row, is_held] = model.margins(scaled[is_held])
        nll = -(label * log_expit(margins) + (1 - label) * log_expit(-margins)).mean(axis=1)
        best = margins[int(np.argmin(nll))]
        chances[repeat] = label * expit(best) + (1 - label) * expit(-best)
    return Cartography(chances)


def suspected_labels(chances: Float[np.ndarray, " pairs"], *, false_positive_rate: float = 0.05) -> SuspectedLabels:
    """Labels to look at again, as many as keep the share of right labels among them small.

    With calibrated probabilities `p_i` of the labels, the expected share of right labels that a threshold suspects is
    the sum of the suspected pairs' `p_i` over that of all. The threshold is the largest one within the rate.

    Args:
        chances: probability of each pair's label by a model that has not seen it.
        false_positive_rate: largest share of right labels to suspect, in (0, 1).

    Raises:
        ConfigError: if the rate is not in (0, 1).
    """
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"false_positive_rate must lie in (0, 1), got {false_positive_rate}")
    order = np.argsort(chances, kind="stable")
    right = np.cumsum(chances[order])
    num = int(np.searchsorted(right, false_positive_rate * right[-1], side="right"))
    num = min(num, int(np.sum(chances < 0.5)))  # a label that is more probable than not is no suspect
    flagged = order[:num]
    return SuspectedLabels(
        tuple(flagged.tolist()),
        threshold=float(chances[order[num]]) if num < len(order) else 1.0,
        false_positive_rate=float(chances[flagged].sum() / right[-1]),
        num_wrong=float((1 - chances[flagged]).sum()),
    )


def with_flips(
    label: Float[np.ndarray, " pairs"], share: float, seed: int
) -> tuple[Float[np.ndarray, " pairs"], Bool[np.ndarray, " pairs"]]:
    """Labels of which an exact random share is turned around, and which these are; to try a detector on."""
    is_wrong = np.zeros(len(label), dtype=bool)
    is_wrong[random_positions(len(label), round(share * len(label)), [seed, 4])] = True
    return np.where(is_wrong, 1 - label, label), is_wrong
