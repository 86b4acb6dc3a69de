"""Results of `rm-opt blame`: influence of training pairs and of groups of them, and how well it predicts retraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import cluster_totals, student_mean
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import NOT_STORED, JsonRecord

Of = Literal["margin", "loss", "eigenvector"]
MOST_LISTED = 20
"""Number of pairs at each end that a result lists."""
_NUM_SHUFFLES = 1000


@dataclass(frozen=True)
class Half:
    """A model that was trained on a part of the pairs by the same recipe.

    Args:
        rows: positions of its training pairs, counted from 0.
        margins: its margins of the target's pairs.
    """

    rows: Sequence[int]
    margins: Sequence[float]


@dataclass(frozen=True)
class PairBlame:
    """Influence of a training pair.

    Args:
        row: its position in the data, counted from 1.
        pair_id: its identity.
        influence: change of the target when the pair is in training.
        words: what the words of the pair's texts alone would have said; see `Blame`.
        groups: its group in each column.
        prompt: its prompt, or the last message of it.
        chosen: its chosen response.
        rejected: its rejected response.
    """

    row: int
    pair_id: str
    influence: float
    words: float
    groups: Mapping[str, str]
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class GroupBlame:
    """Influence of the pairs of a group.

    Args:
        column: column that groups them, such as `source` or `annotator`.
        name: the group.
        num_pairs: its pairs.
        total: sum of its pairs' influences, with an interval over prompts.
        mean: influence of one of its pairs.
        by_model: the sum by each model.
        p_value: share of shuffled assignments in which some group of the column departs as much from the mean influence
            (the largest of all groups' deviations, so that without any effect 5 % of columns have a value below 0.05).
        words: the sum that the words of the texts alone would have said.
    """

    column: str
    name: str
    num_pairs: int
    total: Estimate
    mean: float
    by_model: tuple[float, ...]
    p_value: float
    words: float


@dataclass(frozen=True)
class Blame(JsonRecord, indent=1, rows="groups"):
    """Training pairs and groups of them that moved a target.

    Args:
        target: name of the target.
        of: `margin`, `loss` or `eigenvector`.
        value: the target by the model, the mean over models: the mean margin, the mean loss, or the first
            eigenvalue of `H` over the weight of the pairs.
        num_pairs: training pairs.
        num_left_out: of these, pairs that are equal after truncation, whose influence is 0.
        num_models: models whose influences were averaged: checkpoints, or runs that differ in the seed.
        damping: damping of each model, as a share of the largest eigenvalue.
        rule: the rule that chose the damping.
        projection_error: standard deviation of an inner product of gradients by their projection, relative to the
            product of their lengths; 0 without a projection.
        validated: linear datamodeling score of the influences; None if no model was retrained.
        words_score: the same score of the words alone (tf-idf of the chosen response less the rejected one's, inner
            products); None if no model was retrained.
        agreement: rank correlation of the influences with what the words alone say.
        groups: each group of each column, the largest sums first.
        raised: pairs whose presence raises the target most.
        lowered: pairs whose presence lowers it most.
        above_words: `validated` less `words_score`; None if no model was retrained.
        pair_ids: identity of each training pair.
        influence: influence of each.
        words: what the words alone say of each.
    """

    target: str
    of: Of
    value: float
    num_pairs: int
    num_left_out: int
    num_models: int
    damping: tuple[float, ...]
    rule: str
    projection_error: float
    validated: Estimate | None
    words_score: Estimate | None
    agreement: float
    groups: tuple[GroupBlame, ...]
    raised: tuple[PairBlame, ...]
    lowered: tuple[PairBlame, ...]
    above_words: Estimate | None = None
    pair_ids: tuple[str, ...] = field(metadata=NOT_STORED, default=())
    influence: Float[np.ndarray, " pairs"] = field(metadata=NOT_STORED, default_factory=lambda: np.zeros(0))
    words: Float[np.ndarray, " pairs"] = field(metadata=NOT_STORED, default_factory=lambda: np.zeros(0))


def datamodeling_score(
    influence: Float[np.ndarray, "pairs targets"],
    halves: Sequence[Half],
    *,
    less: Float[np.ndarray, "pairs targets"] | None = None,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Linear datamodeling score (Park et al., 2023, arXiv:2303.14186).

    It is the rank correlation, over models trained on parts of the pairs, of a target's number with the sum of its
    influences in the part, averaged over targets. The interval is a bootstrap over models and targets. Retraining in
    another order moves the numbers too, so that even a perfect prediction stays below 1.

    Args:
        influence: influence of each training pair on each target.
        halves: the models.
        less: other influences, whose score is subtracted in each resample; None subtracts nothing.
        num_bootstrap: resamples.
        seed: seed of the resampling.

    Raises:
        DataError: if there are fewer than 4 models.
    """
    if len(halves) < 4:
        raise DataError(f"a linear datamodeling score needs at least 4 retrained models, got {len(halves)}")
    member = np.zeros((len(halves), len(influence)))
    for row, half in zip(member, halves, strict=True):
        row[list(half.rows)] = 1
    tables = [member @ each for each in (influence, less) if each is not None]
    seen = np.array([half.margins for half in halves])

    def score(models: np.ndarray, targets: np.ndarray) -> float:
        drawn, *ranks = (_ranks(table[np.ix_(models, targets)]) for table in (seen, *tables))
        first, *other = (float((drawn * each).sum(axis=0).mean()) for each in ranks)
        return first - sum(other)

    generator = np.random.default_rng(seed)
    num_models, num_targets = seen.shape
    draws = [
        score(*(generator.integers(num, size=(num,)) for num in (num_models, num_targets)))
        for _ in range(num_bootstrap)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail]).tolist()
    value = score(np.arange(num_models), np.arange(num_targets))
    error = float(np.std(draws, ddof=1))
    return Estimate(value, error, num_models, min(low, value), max(high, value), IntervalKind.resampled)


def _ranks(columns: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    """Ranks in each column, centered and of length 1; zeros where all are equal."""
    ranks = rankdata(columns, axis=0)
    ranks -= ranks.mean(axis=0)
    return np.asarray(ranks / np.maximum(np.sqrt((ranks**2).sum(axis=0)), 1e-12))


def rank_correlation(first: Float[np.ndarray, " pairs"], second: Float[np.ndarray, " pairs"]) -> float:
    """Spearman's rank correlation; 0 if one of the two does not vary."""
    both = _ranks(np.stack([first, second], axis=1))
    return float(both[:, 0] @ both[:, 1])


def groups_of_column(
    column: str,
    names: np.ndarray,
    influence: np.ndarray,
    words: np.ndarray,
    by_model: Sequence[np.ndarray],
    prompts: Sequence[str],
    seed: int,
) -> list[GroupBlame]:
    """Influence of each group of a column, compared with shuffled assignments of the groups."""
    known, member = np.unique(names, return_inverse=True)
    # prompts whose pairs all belong to one group are shuffled whole, since their pairs are not independent
    units = np.unique(np.array(prompts), return_inverse=True)[1]
    is_whole = len({*zip(units.tolist(), member.tolist(), strict=True)}) == units.max() + 1
    units = units if is_whole else np.arange(len(names))
    of_unit = cluster_totals(np.stack([influence - influence.mean(), np.ones(len(names))], axis=1), units.tolist())
    group_of_unit = np.zeros(len(of_unit), dtype=np.int64)
    group_of_unit[units] = member
    spread = max(float(of_unit[:, 0].std()), 1e-300)

    def deviations(groups: np.ndarray) -> np.ndarray:
        sums = np.bincount(groups, of_unit[:, 0], len(known))
        count = np.bincount(groups, minlength=len(known))
        return np.abs(sums) / (spread * np.sqrt(np.maximum(count * (1 - count / len(of_unit)), 1e-12)))

    generator = np.random.default_rng(seed)
    largest = np.array([deviations(generator.permutation(group_of_unit)).max() for _ in range(_NUM_SHUFFLES)])
    found = []
    for place, (name, deviation) in enumerate(zip(known.tolist(), deviations(group_of_unit), strict=True)):
        inside = member == place
        sums = cluster_totals(influence[inside, None], np.array(prompts)[inside].tolist())[:, 0]
        total = student_mean(len(sums) * sums)
        p_value = float((1 + (largest >= deviation).sum()) / (1 + _NUM_SHUFFLES))
        totals = tuple(float(one[inside].sum()) for one in by_model)
        count = int(inside.sum())
        found.append(
            GroupBlame(column, name, count, total, total.value / count, totals, p_value, float(words[inside].sum()))
        )
    return found
