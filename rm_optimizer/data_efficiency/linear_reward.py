"""A Bradley-Terry model that is linear in fixed features: the features, and its exact fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from scipy.special import expit, log_expit

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.data_efficiency.pool import read_pool
from rm_optimizer.errors import DataError
from rm_optimizer.records.ledger import progress

_WORD = re.compile(r"[^\W_]+(?:'\w+)?")


def text_differences(
    pairs: Sequence[PreferencePair], *, num_directions: int = 48, fewest: int = 3
) -> Float[np.ndarray, "pairs features"]:
    """Features of the chosen response less those of the rejected one.

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
    normalized = weighted.multiply(1 / np.maximum(lengths, 1e-12)[:, None]).tocsr()
    rank = min(num_directions, min(normalized.shape) - 1)
    _, _, directions = svds(normalized, k=rank, v0=np.ones(min(normalized.shape)))
    plain = np.array([[np.log(len(text)), text.count("?")] for text in texts])
    features = np.concatenate([normalized @ directions[::-1].T, plain], axis=1)
    differences = features[0::2] - features[1::2]
    return np.asarray(differences / np.maximum(differences.std(axis=0), 1e-12))


_MOST_STEPS = 100
_DECREASE = 1e-10
"""Newton decrement per pair at which the fit ends."""


def fixed_differences(
    pairs: PreferenceDataset, model: BradleyTerryRM | None, folder: Path | None = None
) -> Float[np.ndarray, "pairs features"]:
    """Features of the chosen responses less those of the rejected ones.

    Args:
        pairs: the pairs.
        model: model whose last layer is the features; None takes words, length and question marks.
        folder: folder for a model's features while they are computed.
    """
    if model is None:
        return text_differences(pairs)
    with progress("features", "pairs") as show:
        found = read_pool(pairs, model, folder=folder, on_progress=lambda done: show(done, len(pairs)))
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
        differences: features of the first response less those of the second.
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
