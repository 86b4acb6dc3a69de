"""Comparisons of the same optimizers on several data sets, in two numbers for each optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.aggregates import interquartile_mean, probability_of_improvement
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings
from rm_optimizer.records.codec import JsonRecord

NUM_BOOTSTRAP = 2000


@dataclass(frozen=True, kw_only=True)
class ArmAcross(JsonRecord):
    """An optimizer over several data sets (Agarwal et al., 2021, Section 4.3).

    Args:
        name: name of the optimizer.
        accuracy: interquartile mean of the test accuracy over data sets and seeds.
        improvement: probability that one of its runs has a smaller test NLL than a run of the reference, on a random
            data set; None for the reference.
    """

    name: str
    accuracy: Estimate
    improvement: Estimate | None


@dataclass(frozen=True, kw_only=True)
class AcrossDatasets(JsonRecord, indent=1):
    """Comparisons of the same optimizers on several data sets.

    Args:
        reference: optimizer that the others are compared with.
        test_pairs: digest of the test pairs of each comparison.
        seeds: number of seeds of each optimizer on each data set.
        arms: the optimizers.
    """

    reference: str
    test_pairs: tuple[str, ...]
    seeds: int
    arms: tuple[ArmAcross, ...]


def across_datasets(comparisons: Sequence[ComparisonFindings]) -> AcrossDatasets:
    """Aggregate comparisons of the same optimizers on at least three data sets.

    Args:
        comparisons: findings of the comparisons, each with its own test pairs.

    Raises:
        ConfigError: if there are fewer than three, they differ in optimizers, reference or seeds, or share test pairs.
    """
    options = [found.frozen.options for found in comparisons]
    for name, values in (
        ("optimizers", {tuple(sorted(each.optimizers)) for each in options}),
        ("reference", {each.reference for each in options}),
        ("finished seeds", {len(arm.seeds) for found in comparisons for arm in found.arms}),
    ):
        if len(values) > 1:
            shown = " and ".join(sorted(str(value) for value in values))
            raise ConfigError(f"comparisons on several data sets must have the same {name}, got {shown}")
    tests = tuple(found.frozen.fingerprints["test"] for found in comparisons)
    if len(set(tests)) < len(tests):
        raise ConfigError("comparisons on several data sets must have different test pairs; two of these have the same")
    reference = options[0].reference
    names = options[0].optimizers
    nll = {name: _scores(comparisons, name, "nll") for name in names}
    arms = tuple(
        ArmAcross(
            name=name,
            accuracy=interquartile_mean(_scores(comparisons, name, "accuracy"), num_bootstrap=NUM_BOOTSTRAP, seed=0),
            improvement=None
            if name == reference
            else probability_of_improvement(-nll[name], -nll[reference], num_bootstrap=NUM_BOOTSTRAP, seed=0),
        )
        for name in names
    )
    return AcrossDatasets(reference=reference, test_pairs=tests, seeds=nll[reference].shape[1], arms=arms)


def _scores(comparisons: Sequence[ComparisonFindings], arm: str, score: str) -> Float[np.ndarray, "datasets seeds"]:
    """An arm's score of each seed on each data set."""
    return np.array([each.per_seed[score] for found in comparisons for each in found.arms if each.name == arm])
