"""The cleaning study: labels are flipped, detected as in `data clean`, and left out of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.data_efficiency.cleaning.wrong_labels import (
    held_out_chances,
    held_out_margins,
    scaled_features,
    suspected_labels,
    with_flips,
)
from rm_optimizer.data_efficiency.linear_reward import fit_linear_reward
from rm_optimizer.data_efficiency.savings.label_pools import (
    LabeledFeatures,
    LabelSplit,
    SyntheticPool,
    digest_of,
    synthetic_split,
)
from rm_optimizer.data_efficiency.savings.label_study import tested
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.study.plan import PlannedTrial, planned_trial
from rm_optimizer.records.codec import JsonRecord

TASK = "rm_optimizer.data_efficiency.cleaning.cleaning_study:measure"
"""Task of the study's trials."""
_FOLDS = 5
_DECIDED_STD = 40.0
"""Standard deviation of an oracle's margins at which its labels have no noise."""


class CleaningWorld(StrEnum):
    """Synthetic pairs of Gaussian features with a linear oracle.

    In `decided` the label always names the better response. In `noisy` labels are drawn from a Bradley-Terry model
    whose margins have a standard deviation of 2, so that about a fifth of the labels name the worse response.
    """

    decided = "decided"
    noisy = "noisy"


@dataclass(frozen=True)
class CleaningRow(JsonRecord, indent=1):
    """Results for one share of flips in one pool, over random splits, with Student's intervals.

    Args:
        pool: name of the pool.
        flips: share of labels that was flipped.
        num_pairs: number of training pairs.
        num_splits: number of splits.
        auroc: AUROC of the held-out probability as a detector of flipped labels; None without flips.
        estimated: estimated share of flipped labels.
        suspected: share of the pairs that was removed.
        precision: share of flipped labels among the removed ones; None without flips or suspects.
        accuracy: test accuracy after training on all pairs.
        gain: accuracy after training on the remaining pairs, less `accuracy`.
        fewer_gain: gain after removing as many random pairs.
        exact_gain: gain after removing exactly the flipped labels; None in results of earlier versions.
    """

    pool: str
    flips: float
    num_pairs: int
    num_splits: int
    auroc: Estimate | None
    estimated: Estimate
    suspected: Estimate
    precision: Estimate | None
    accuracy: Estimate
    gain: Estimate
    fewer_gain: Estimate
    exact_gain: Estimate | None = None


def planned_cleanings(
    pool: str,
    num_splits: int,
    shares: Sequence[float],
    *,
    num_pairs: int = 1000,
    false_positive_rate: float = 0.05,
    features: Path | None = None,
) -> list[PlannedTrial]:
    """Trials of a pool, one for each split and share of flips.

    Args:
        pool: name of a `CleaningWorld`, or of the pool in `features`.
        num_splits: number of splits.
        shares: shares of the training labels to flip, in [0, 0.5).
        num_pairs: training pairs in each split.
        false_positive_rate: largest share of right labels to remove.
        features: file of a `LabeledFeatures`; None for a synthetic world.

    Raises:
        ConfigError: if a share or the rate is out of its range.
        DataError: if the pool is too small.
    """
    if bad := [share for share in shares if not 0 <= share < 0.5]:
        raise ConfigError(f"--flips must lie in [0, 0.5), got {bad[0]:g}")
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"--false-positive-rate must lie in (0, 1), got {false_positive_rate:g}")
    source = None if features is None else LabeledFeatures.read(features)
    if (most := len(_split(pool, source, 0).labels)) < num_pairs:
        raise DataError(f"a split of '{pool}' has {most:,} training pairs, fewer than --pairs {num_pairs}; lower it")
    shared = {"num_pairs": num_pairs, "false_positive_rate": false_positive_rate, "content": digest_of(features)}
    path = None if features is None else str(features.resolve())
    return [
        planned_trial(
            f"{pool} flips={share:g} split={seed}",
            (spec := {"pool": pool, "name": f"{pool}, {share:g} flipped", "split": seed, "flips": share} | shared)
            | {"features": path},
            spec,
        )
        for share in dict.fromkeys(shares)
        for seed in range(num_splits)
    ]


def measure(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Suspected labels of one split, and the test accuracy with and without them.

    Each model has the penalty with its lowest held-out NLL.

    Args:
        spec: one of `planned_cleanings`.
        folder: not used; a trial takes seconds.
    """
    features = None if spec["features"] is None else LabeledFeatures.read(Path(spec["features"]))
    seed, num = spec["split"], spec["num_pairs"]
    split = _split(spec["pool"], features, seed)
    drawn = random_positions(len(split.labels), num, [seed, 6])
    differences, groups = split.differences[drawn], split.groups[drawn]
    label, is_wrong = with_flips(split.labels[drawn], spec["flips"], seed)
    chances = held_out_chances(differences, label, groups, seed=seed).confidence
    found = suspected_labels(chances, false_positive_rate=spec["false_positive_rate"])
    suspects = np.isin(np.arange(num), found.positions)
    fewer = np.isin(np.arange(num), random_positions(num, int(suspects.sum()), [seed, 7]))

    def accuracy(kept: np.ndarray) -> float:
        parts = differences[kept], label[kept], groups[kept]
        _, ridge = held_out_margins(*parts, num_folds=_FOLDS, seed=[seed, 8])
        model = fit_linear_reward(scaled_features(parts[0]), parts[1], ridge=ridge)
        scaled = scaled_features(split.test_differences, parts[0])
        return tested(model, scaled, split.test_chances)[0]

    whole = accuracy(np.ones(num, dtype=bool))
    taken_out = {"gain": suspects, "fewer_gain": fewer, "exact_gain": is_wrong}
    gains = {name: accuracy(~out) - whole if out.any() else 0.0 for name, out in taken_out.items()}
    return {
        "pool": spec["pool"],
        "flips": spec["flips"],
        "num_pairs": num,
        "auroc": _separation(-chances[is_wrong], -chances[~is_wrong]),
        "estimated": found.flipped_share,
        "suspected": float(suspects.mean()),
        "precision": float(is_wrong[suspects].mean()) if is_wrong.any() and suspects.any() else None,
        "accuracy": whole,
        **gains,
    }


def cleaning_rows(rows: Iterable[Mapping[str, Any]]) -> list[CleaningRow]:
    """Means over splits of every pool and share of flips, from the rows of a study; unfinished trials are left out.

    Raises:
        DataError: if no pool has two finished splits.
    """
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["state"] == "finished":
            found[row["pool"], row["flips"]].append(row)

    def mean(splits: Sequence[Mapping[str, Any]], name: str) -> Estimate | None:
        values = np.array([row[name] for row in splits if row.get(name) is not None])
        return student_mean(values) if len(values) > 1 else None

    names = ("auroc", "estimated", "suspected", "precision", "accuracy", "gain", "fewer_gain", "exact_gain")
    measured = [
        CleaningRow(pool, flips, splits[0]["num_pairs"], len(splits), **{name: mean(splits, name) for name in names})  # type: ignore[arg-type]
        for (pool, flips), splits in found.items()
        if len(splits) > 1
    ]
    if not measured:
        raise DataError("the study has no pool with two finished splits yet")
    return measured


def _split(pool: str, features: LabeledFeatures | None, seed: int) -> LabelSplit:
    if features is not None:
        return features.split(seed)
    world = CleaningWorld(pool)
    if world == CleaningWorld.decided:
        return synthetic_split(SyntheticPool.iid, seed, margin_std=_DECIDED_STD)
    return synthetic_split(SyntheticPool.iid, seed)


def _separation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Area under the ROC curve: probability that a value of the first is larger than one of the second, ties half."""
    if not len(first) or not len(second):
        return None
    return float(mannwhitneyu(first, second).statistic / (len(first) * len(second)))
