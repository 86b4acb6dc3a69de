"""Linear models of pairs, training dynamics, wrong labels, and the curriculum."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from scipy.special import expit, log_expit

from rm_optimizer.core.metrics.calibration import flipped_labels
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.data_efficiency.pool import read_pool
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.ledger import progress
from rm_optimizer.schema.checks import require
from rm_optimizer.training.data.curriculum import CurriculumSampler as CurriculumSampler

_WORD = re.compile(r"[^\W_]+(?:'\w+)?")


def text_differences(
    pairs: Sequence[PreferencePair], *, num_directions: int = 48, fewest: int = 3
) -> Float[np.ndarray, "pairs features"]:
    """Features of the chosen response less the rejected one's.

    The features of a response are its coordinates on the leading singular directions of all responses' normalized
    tf-idf vectors (words, lower case), the logarithm of its length in characters, and its number of question marks.
    Each is divided by the deviation of its differences.

    Args:
        pairs: the pairs; their labels are not read.
        num_directions: number of singular directions; fewer if there are fewer responses or words.
        fewest: least number of responses that contain a word for it to count.

    Raises:
        DataError: if fewer than two words occur in so many responses.
    """
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    normalized = word_vectors(texts, fewest=fewest)
    rank = min(num_directions, min(normalized.shape) - 1)
    _, _, directions = svds(normalized, k=rank, v0=np.ones(min(normalized.shape)))
    plain = np.array([[np.log(len(text)), text.count("?")] for text in texts])
    features = np.concatenate([normalized @ directions[::-1].T, plain], axis=1)
    differences = features[0::2] - features[1::2]
    return np.asarray(differences / np.maximum(differences.std(axis=0), 1e-12))


def word_vectors(texts: Sequence[str], *, fewest: int = 3) -> csr_matrix:
    """Normalized tf-idf vectors `(texts, words)` of lower-case words.

    Args:
        texts: the texts.
        fewest: least number of texts that contain a word for it to count.

    Raises:
        DataError: if fewer than two words occur in so many texts.
    """
    words = [Counter(_WORD.findall(text.lower())) for text in texts]
    frequency = Counter(word for counts in words for word in counts)
    known = {word: column for column, word in enumerate(sorted(w for w, n in frequency.items() if n >= fewest))}
    if len(known) < 2:
        raise DataError(f"text features need words that occur in at least {fewest} responses; give more pairs")
    entries = [(row, known[w], n) for row, counts in enumerate(words) for w, n in counts.items() if w in known]
    rows, columns, counts = (np.array(part) for part in zip(*entries, strict=True))
    rarity = np.log(len(texts) / np.array([frequency[word] for word in known])) + 1
    weighted = csr_matrix((counts * rarity[columns], (rows, columns)), shape=(len(texts), len(known)))
    lengths = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
    return weighted.multiply(1 / np.maximum(lengths, 1e-12)[:, None]).tocsr()


_MOST_STEPS = 100
_DECREASE = 1e-10
"""Newton decrement per pair at which the fit ends."""


def fixed_differences(pairs: PreferenceDataset, model: BradleyTerryRM | None) -> Float[np.ndarray, "pairs features"]:
    """Features of the chosen responses less the rejected ones'.

    Args:
        pairs: the pairs.
        model: model whose last layer is the features; None takes words, length and question marks.
    """
    if model is None:
        return text_differences(pairs)
    with progress("features", "pairs") as show:
        found = read_pool(pairs, model, on_progress=lambda done: show(done, len(pairs)))
    differences = found.require_differences("v_optimal").astype(float)
    return differences / max(float(differences.std()), 1e-12)


def fit_linear_reward(
    differences: Float[np.ndarray, "pairs hidden"], label: Float[np.ndarray, " pairs"], *, ridge: float
) -> Float[np.ndarray, " hidden"]:
    """Weights ``w`` of the reward that maximize the penalized likelihood of the labels.

    They minimize ``-sum_i [y_i log p_i + (1 - y_i) log(1 - p_i)] + ridge/2 |w|^2`` with ``p_i = sigmoid(w'z_i)``.
    Newton's method with step halving. Without halving, a fit to few labels diverges, which makes the random baseline
    look bad and every other rule good.

    Args:
        differences: features of the first response less the second's.
        label: probability that the first response is better, in [0, 1].
        ridge: precision of the prior, positive.
    """
    weights = np.zeros(differences.shape[1])

    def objective(at: np.ndarray) -> float:
        margins = differences @ at
        terms = label * log_expit(margins) + (1 - label) * log_expit(-margins)
        return float(ridge / 2 * at @ at - terms.sum())

    value = objective(weights)
    for _ in range(_MOST_STEPS):
        chances = expit(differences @ weights)
        gradient = differences.T @ (chances - label) + ridge * weights
        curved = differences * (chances * (1 - chances))[:, None]
        factor = np.linalg.cholesky(differences.T @ curved + ridge * np.eye(len(weights)))
        step = cho_solve((factor, True), gradient)
        if float(gradient @ step) < _DECREASE * max(len(label), 1):
            break
        size = 1.0
        while (lower := objective(weights - size * step)) > value:
            size /= 2
        weights, value = weights - size * step, lower
    return weights


RIDGES = tuple(float(ridge) for ridge in 10.0 ** np.arange(-2.0, 4.1, 0.5))
"""Penalties to choose from, for differences of features with unit variance."""


@dataclass(frozen=True)
class Cartography:
    """Training dynamics of pairs (dataset cartography; Swayamdipta et al., 2020, arXiv:2009.10795).

    Args:
        chances: probability of each pair's own label after each epoch, or by each model.

    Raises:
        DataError: if one is not a probability.
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

    Each repeat divides the conversations into folds at random. Its penalty has the lowest held-out NLL, so
    that the probabilities are neither over- nor under-confident.

    Args:
        differences: features of the first response less the second's.
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
        differences: features of the first response less the second's.
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
    scaled = differences / np.maximum(np.sqrt((differences**2).mean(axis=0)), 1e-12)
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
    require(0 < false_positive_rate < 1, "false_positive_rate", "lie in (0, 1)", false_positive_rate)
    share, flipped = flipped_labels(chances)
    order = np.argsort(chances, kind="stable")
    right = np.cumsum(1 - flipped[order])
    num = int(np.searchsorted(right, false_positive_rate * right[-1], side="right"))
    num = min(num, int(np.sum(flipped > 0.5)))
    suspects = order[:num]
    return SuspectedLabels(
        tuple(suspects.tolist()),
        threshold=float(chances[order[num]]) if num < len(order) else 1.0,
        false_positive_rate=float((1 - flipped[suspects]).sum() / right[-1]),
        num_wrong=float(flipped[suspects].sum()),
        flipped_share=share,
    )


def turned(
    differences: Float[np.ndarray, "pairs features"], seed: int
) -> tuple[Float[np.ndarray, "pairs features"], Float[np.ndarray, " pairs"]]:
    """Differences with each pair's responses in random order, and 1 where the chosen one comes first, else 0.

    Args:
        differences: features of the chosen response less the rejected one's.
        seed: seed of the order.
    """
    first = np.random.default_rng([seed, 1]).integers(0, 2, size=len(differences)).astype(float)
    return differences * (2 * first - 1)[:, None], first
