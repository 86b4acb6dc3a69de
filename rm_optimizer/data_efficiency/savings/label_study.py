"""The label-savings study: acquisition functions compared with a random draw over many splits, as trials of a study.

Every rule starts with the same random pairs and asks for labels in batches. The model is fitted again in each round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Float
from scipy.special import log_expit

from rm_optimizer.data_efficiency.acquisition.pool import Pool
from rm_optimizer.data_efficiency.acquisition.rules import RULES, acquisition_function
from rm_optimizer.data_efficiency.linear_reward import LinearReward, fit_linear_reward
from rm_optimizer.data_efficiency.savings.label_pools import (
    LabeledFeatures,
    LabelSplit,
    SyntheticPool,
    digest_of,
    synthetic_split,
)
from rm_optimizer.data_efficiency.savings.label_savings import LabelSavings, label_savings
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.study.plan import PlannedTrial, planned_trial

TASK = "rm_optimizer.data_efficiency.savings.label_study:measure"
"""Task of the study's trials."""
RANDOM, PLACEBO = "random", "random_again"
RIDGES = tuple(float(ridge) for ridge in 10.0 ** np.arange(-1.0, 3.51, 0.5))
"""Penalties to choose from."""
TUNING_SPLITS = 10
"""Number of splits on which the penalty for each number of labels is chosen; no trial has their seeds."""
_TUNING_SEED = 1_000_000
NUM_MEMBERS = 32
"""Draws from the posterior that serve as members of an ensemble."""


@dataclass(frozen=True)
class LabelStudy:
    """Numbers of labels that all trials of a pool share.

    Args:
        budget: number of labels at which rules are compared; curves extend to twice as many.
        start: number of random labels that every rule starts with.
        batch: number of labels in each round.
        flips: share of the pool's labels to flip.
    """

    budget: int = 512
    start: int = 64
    batch: int = 64
    flips: float = 0.0

    def __post_init__(self) -> None:
        if self.start < 2 or self.batch < 1 or self.budget <= self.start or (self.budget - self.start) % self.batch:
            raise ConfigError(
                f"--budget must be --start and a multiple of --batch labels, got {self.budget}, {self.start} and "
                f"{self.batch}"
            )
        if not 0 <= self.flips < 0.5:
            raise ConfigError(f"--flips must lie in [0, 0.5), got {self.flips}")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Numbers of labels after each round."""
        return tuple(range(self.start, 2 * self.budget + 1, self.batch))


def planned_splits(study: LabelStudy, pool: str, num_splits: int, features: Path | None = None) -> list[PlannedTrial]:
    """Trials of a pool, one for each split, with the penalties that are best for the random draw.

    Args:
        study: the study of the splits.
        pool: name of a synthetic pool, or of the pool in `features`.
        num_splits: number of splits.
        features: file of a `LabeledFeatures`; None for a synthetic pool.

    Raises:
        DataError: if the pool is too small.
    """
    name = f"{pool}, {study.flips:.0%} flipped" if study.flips else pool
    shared = {"pool": pool, "name": name, **asdict(study), "content": digest_of(features)}
    source = None if features is None else LabeledFeatures.read(features)
    largest = len(_split(pool, source, study.flips, 0).labels)
    if largest < 2 * study.budget:
        raise DataError(
            f"pool '{pool}' has {largest:,} pairs to choose from, fewer than twice --budget {study.budget}; lower it"
        )
    shared["ridges"] = _tuned_ridges(study, pool, source)
    path = None if features is None else str(features.resolve())
    return [
        planned_trial(f"{name} split={seed}", shared | {"split": seed, "features": path}, shared | {"split": seed})
        for seed in range(num_splits)
    ]


def require_one_pool_a_name(trials: Iterable[PlannedTrial]) -> None:
    """Refuse trials with the same pool name but different pairs, features or options, which a table would mix.

    Raises:
        ConfigError: if there are such trials; the text names the pool.
    """
    settings: dict[str, dict[str, Any]] = {}
    for trial in trials:
        own = {name: value for name, value in trial.spec.items() if name not in ("split", "features")}
        if settings.setdefault(own["name"], own) != own:
            raise ConfigError(
                f"the folder holds a pool '{own['name']}' of other pairs, features or options; give this one another "
                "--name, or choose another folder"
            )


def measure(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Accuracy and NLL of every rule after every round on one split, as `RULE/LABELS/METRIC`.

    Args:
        spec: one of `planned_splits`.
        folder: not used; a trial takes seconds.
    """
    study = LabelStudy(spec["budget"], spec["start"], spec["batch"], spec["flips"])
    features = None if spec["features"] is None else LabeledFeatures.read(Path(spec["features"]))
    seed = spec["split"]
    split = _split(spec["pool"], features, study.flips, seed)
    values: dict[str, float | int | str | None] = {"pool": spec["name"], "split": seed}
    for rule in (*RULES, PLACEBO):  # each with its own seed, which does not depend on other rules
        for labels, model in _rounds(split, study, rule, spec["ridges"], [seed, crc32(rule.encode())]):
            accuracy, nll = tested(model, split.test_differences, split.test_chances)
            values |= {f"{rule}/{labels}/accuracy": accuracy, f"{rule}/{labels}/nll": nll}
    return values


def savings_by_pool(rows: Iterable[Mapping[str, Any]], *, num_bootstrap: int = 1000) -> list[LabelSavings]:
    """Savings of every rule in every pool, from the rows of a study.

    Args:
        rows: rows of `Study.rows`; unfinished trials are left out.
        num_bootstrap: resamples of splits.

    Raises:
        DataError: if no pool has two finished splits.
    """
    by_pool: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["state"] == "finished":
            by_pool[row["pool"]].append(row)
    found = [_savings(pool, splits, num_bootstrap=num_bootstrap) for pool, splits in by_pool.items() if len(splits) > 1]
    if not found:
        raise DataError("the study has no pool with two finished splits yet")
    return found


def curves(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """Numbers of labels, and each rule's `metric` over splits and numbers of labels, from finished rows of one pool."""
    names = [name.split("/") for name in rows[0] if name.endswith("/accuracy")]
    labels = sorted({int(number) for _, number, _ in names})
    rules = dict.fromkeys(rule for rule, _, _ in names)
    return labels, {
        rule: np.array([[row[f"{rule}/{number}/{metric}"] for number in labels] for row in rows]) for rule in rules
    }


def _savings(pool: str, rows: Sequence[Mapping[str, Any]], *, num_bootstrap: int) -> LabelSavings:
    labels, accuracy = curves(rows, "accuracy")
    _, nll = curves(rows, "nll")
    return label_savings(
        pool,
        labels,
        accuracy,
        nll,
        budget=labels[-1] // 2,
        reference=RANDOM,
        placebo=PLACEBO,
        num_bootstrap=num_bootstrap,
    )


def _split(pool: str, features: LabeledFeatures | None, flips: float, seed: int) -> LabelSplit:
    split = synthetic_split(SyntheticPool(pool), seed) if features is None else features.split(seed)
    return split.flipped(flips, seed) if flips else split


def _tuned_ridges(study: LabelStudy, pool: str, features: LabeledFeatures | None) -> list[float]:
    """Penalty for each number of labels: the one with the lowest mean test NLL of random draws, on separate splits."""
    totals = np.zeros((len(study.budgets), len(RIDGES)))
    for number in range(TUNING_SPLITS):
        seed = _TUNING_SEED + number
        split = _split(pool, features, study.flips, seed)
        order = np.random.default_rng(seed).permutation(len(split.labels))
        for row, labels in enumerate(study.budgets):
            known = order[:labels]
            for column, ridge in enumerate(RIDGES):
                model = fit_linear_reward(split.differences[known], split.labels[known], ridge=ridge)
                totals[row, column] += tested(model, split.test_differences, split.test_chances)[1]
    return [RIDGES[column] for column in totals.argmin(axis=1)]


def _rounds(
    split: LabelSplit, study: LabelStudy, rule: str, ridges: Sequence[float], seed: Sequence[int]
) -> Iterator[tuple[int, LinearReward]]:
    """Number of labels and model of each round of one rule; the first labels depend only on the split."""
    acquire = acquisition_function(RANDOM if rule == PLACEBO else rule)
    generator = np.random.default_rng([*seed, 0])
    is_labeled = np.zeros(len(split.labels), dtype=bool)
    is_labeled[np.random.default_rng([seed[0], 3]).permutation(len(split.labels))[: study.start]] = True
    for turn, (labels, ridge) in enumerate(zip(study.budgets, ridges, strict=True)):
        model = fit_linear_reward(split.differences[is_labeled], split.labels[is_labeled], ridge=ridge)
        yield labels, model
        if labels < study.budgets[-1]:
            margins = model.sampled_margins(split.differences, NUM_MEMBERS, generator)
            pool = Pool(margins, split.lengths, is_labeled, split.differences)
            is_labeled[acquire.select(pool, study.batch, seed=int(generator.integers(2**31)) + turn)] = True


def tested(
    model: LinearReward, differences: Float[np.ndarray, "test features"], chances: Float[np.ndarray, " test"]
) -> tuple[float, float]:
    """Expected accuracy and NLL on test pairs whose first response is preferred with these probabilities."""
    margins: Float[np.ndarray, " test"] = model.margins(differences)
    right = np.where(margins > 0, chances, np.where(margins < 0, 1 - chances, 0.5))
    nll = -chances * log_expit(margins) - (1 - chances) * log_expit(-margins)
    return float(right.mean()), float(nll.mean())
