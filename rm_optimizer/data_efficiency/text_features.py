"""Features of responses without a model: singular directions of words, length and question marks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import DataError

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
        raise DataError(f"text features need words that stand in at least {fewest} responses; give more pairs")
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
