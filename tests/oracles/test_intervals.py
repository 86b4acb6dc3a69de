"""Intervals hold the truth, and tests of equal arms find nothing, as often as they say: simulation from fixed seeds.

A count out of n lies in the central 99.9 % of its binomial distribution. Student's interval is exact for means of
normal clusters, so its counts over all numbers of clusters together are held from both sides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from rm_optimizer.core.metrics.effects import PairedScores, holm_adjusted
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import clustered_share, crossed_mean, student_mean
from rm_optimizer.core.metrics.pairwise import evaluate_pairs

CLUSTERS, RUNS = (2, 3, 5, 8, 30), 120
CENTER, OF_PROMPTS, PAIRS = 0.5, 0.7, 6


def band(share: float, count: int) -> tuple[float, float]:
    low, high = stats.binom.ppf([0.0005, 0.9995], count, share) / count
    return float(low), float(high)


def holds(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


@pytest.fixture(scope="module")
def coverage() -> dict[str, dict[int, float]]:
    """Share of data sets whose interval holds the population's value, by statistic and number of prompts."""
    spread = math.hypot(1, OF_PROMPTS)
    nodes = stats.norm.ppf((np.arange(20000) + 0.5) / 20000, CENTER, spread)
    chance = 1 / (1 + np.exp(-nodes))
    truth = {
        "accuracy": stats.norm.cdf(CENTER / spread),
        "mean_margin": CENTER,
        "nll": np.log1p(np.exp(-nodes)).mean(),
        "brier": ((1 - chance) ** 2).mean(),
    }
    found: dict[str, dict[int, float]] = {name: {} for name in truth}
    for count in CLUSTERS:
        prompts = np.repeat(np.arange(count), PAIRS).astype(str).tolist()
        held = dict.fromkeys(truth, 0)
        for seed in range(RUNS):
            rng = np.random.default_rng([count, seed])
            margin = CENTER + np.repeat(rng.normal(0, OF_PROMPTS, count), PAIRS) + rng.normal(0, 1, len(prompts))
            zeros = np.zeros_like(margin)
            metrics = evaluate_pairs(margin, zeros, beta=1.0, prompt_ids=prompts, num_bootstrap=2, seed=seed)
            for name, value in truth.items():
                held[name] += holds(getattr(metrics, name), value)
        for name, number in held.items():
            found[name][count] = number / RUNS
    return found


@pytest.mark.parametrize("clusters", CLUSTERS)
def test_every_interval_of_an_evaluation_holds_the_truth(coverage: dict[str, dict[int, float]], clusters: int):
    """Skewed statistics cover 0.91 at least, which `docs/measured.md` states."""
    for name, shares in coverage.items():
        assert shares[clusters] >= band(0.95 if name == "mean_margin" else 0.91, RUNS)[0], name


def test_means_of_normal_clusters_are_covered_neither_less_nor_more(coverage: dict[str, dict[int, float]]):
    low, high = band(0.95, RUNS * len(CLUSTERS))
    assert low <= np.mean(list(coverage["mean_margin"].values())) <= high


def test_students_mean_at_each_number_of_samples():
    low, high = band(0.95, 2000)
    for count in CLUSTERS:
        draws = np.random.default_rng(count).normal(3.0, 2.0, (2000, count))
        assert low <= np.mean([holds(student_mean(row), 3.0) for row in draws]) <= high


def test_a_mean_over_seeds_and_prompts_at_each_number_of_seeds():
    """Conservative where the seeds hardly differ, exact where they are all that differs."""
    low, high = band(0.95, 400)
    for seeds in (2, 3, 5):
        for of_seeds, of_prompts in ((1.0, 0.0), (1.0, 0.1), (0.1, 0.1)):
            rng, held = np.random.default_rng([seeds, int(10 * of_seeds)]), 0
            for _ in range(400):
                common = rng.normal(0, of_prompts)
                spread = of_prompts * math.sqrt(rng.chisquare(29) / 29)
                held += holds(crossed_mean(rng.normal(common, of_seeds, seeds), spread, 30).estimate, 0.0)
            assert held / 400 >= low
            assert of_prompts or held / 400 <= high


@pytest.mark.parametrize("clusters", [5, 8, 30])
def test_shares_over_clusters(clusters: int):
    held = 0
    for seed in range(400):
        rng = np.random.default_rng([7, clusters, seed])
        chance = np.repeat(rng.beta(3.5, 1.5, clusters), 6)
        rows = (rng.random(len(chance)) < chance).astype(float)
        held += holds(clustered_share(rows, np.repeat(np.arange(clusters), 6)), 0.7)
    assert held / 400 >= band(0.92, 400)[0]


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_arms_differ_no_more_often_than_stated(seeds: int):
    """Two arms by the interval of their difference, and four against a reference by Holm's rule."""
    prompts, runs, differ, verdicts = np.repeat(np.arange(30), 2).astype(str).tolist(), 150, 0, 0
    for seed in range(runs):
        rng = np.random.default_rng([4, seeds, seed])
        shape = (5, seeds, 30, 2)
        margin = rng.normal(0, 1, shape) + rng.normal(0, 1, (1, 1, 30, 1)) + rng.normal(0, 0.5, (5, seeds, 30, 1))
        reference, *others = (margin + rng.normal(0, 0.3, (5, seeds, 1, 1))).reshape(5, seeds, -1)
        differ += not holds(PairedScores(others[0], reference, prompts).effect("nll"), 0.0)
        p_values = [PairedScores(arm, reference, prompts).crossed("nll").p_different for arm in others]
        assert holm(p_values) == pytest.approx(holm_adjusted(np.array(p_values)).tolist())
        verdicts += min(holm(p_values)) < 0.05
    assert differ / runs <= band(0.05, runs)[1]
    assert verdicts / runs <= band(0.05, runs)[1]


def holm(p_values: list[float]) -> list[float]:
    """Holm (1979): the i-th smallest times the number not yet rejected, never below a smaller one's."""
    order = np.argsort(p_values)
    stepped = [min(1.0, (len(p_values) - i) * p_values[place]) for i, place in enumerate(order)]
    found = np.empty(len(p_values))
    found[order] = np.maximum.accumulate(stepped)
    return found.tolist()
