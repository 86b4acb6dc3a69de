"""Intervals cover the truth as often as they say; the bootstrap's, because it resamples prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student

from rm_optimizer.core.metrics.effects import PairedScores
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import (
    FEWEST_RESAMPLED,
    cluster_bootstrap,
    crossed_mean,
    student_mean,
    wilson_interval,
)

SEEDS, PROMPTS = 3, 60


def mean(totals: np.ndarray) -> np.ndarray:
    return totals[..., :1] / totals[..., 1:]


def with_counts(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.ones_like(values)], axis=1)


def test_wilson_interval_solves_its_quadratic():
    # Its ends are the p at which |f - p| = z sqrt(p (1 - p) / n), z = 1.959964.
    for frequency, n in ((0.3, 40), (0.9, 11), (0.5, 7.5)):
        for end in wilson_interval(frequency, n):
            assert abs(frequency - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / n), rel=1e-9)
    assert wilson_interval(0.0, 10)[0] == 0.0
    assert wilson_interval(1.0, 10)[1] == 1.0
    assert wilson_interval(1.0, 10)[0] == pytest.approx(10 / (10 + 1.959963984540054**2))


def test_jackknife_error_of_a_mean_is_its_textbook_error():
    values = np.random.default_rng(0).normal(size=50)
    (estimate,) = cluster_bootstrap(with_counts(values), mean, num_bootstrap=0, seed=0)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    assert (estimate.num_samples, estimate.low, estimate.high) == (50, None, None)


def test_bootstrap_error_of_a_mean_tends_to_the_plug_in_error():
    values = np.random.default_rng(0).normal(size=50)
    (estimate,) = cluster_bootstrap(with_counts(values), mean, num_bootstrap=20_000, seed=0)
    # Relative error of a standard deviation from B draws is 1 / sqrt(2 B) = 0.5 %; four of them.
    assert estimate.standard_error == pytest.approx(values.std() / math.sqrt(50), rel=0.02)


def test_matches_scipys_bca_interval():
    from scipy.stats import bootstrap

    values = np.random.default_rng(3).exponential(size=40)
    (estimate,) = cluster_bootstrap(with_counts(values), mean, num_bootstrap=20_000, seed=0)
    reference = bootstrap((values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1))
    # Monte Carlo error of a 2.5 % quantile of a normal of width s from B draws is about 2.7 s / sqrt(B); five of them.
    tolerance = 5 * 2.7 * reference.standard_error / math.sqrt(20_000)
    assert estimate.low == pytest.approx(reference.confidence_interval.low, abs=tolerance)
    assert estimate.high == pytest.approx(reference.confidence_interval.high, abs=tolerance)


def test_same_seed_same_interval_in_any_chunking(monkeypatch: pytest.MonkeyPatch):
    sums = with_counts(np.random.default_rng(0).normal(size=60))
    first = cluster_bootstrap(sums, mean, num_bootstrap=200, seed=7)
    assert cluster_bootstrap(sums, mean, num_bootstrap=200, seed=7) == first
    assert cluster_bootstrap(sums, mean, num_bootstrap=200, seed=8) != first
    monkeypatch.setattr("rm_optimizer.core.metrics.intervals._RESAMPLED_CLUSTERS_AT_ONCE", 100)
    (chunked,) = cluster_bootstrap(sums, mean, num_bootstrap=200, seed=7)
    assert chunked.low is not None
    assert chunked.low <= chunked.value <= chunked.high


def clustered_coin_flips(rng: np.random.Generator, num_clusters: int, size: int) -> np.ndarray:
    """Successes of each cluster; a cluster has its own probability, uniform in [0.4, 1], so the truth is 0.7."""
    return rng.binomial(1, rng.uniform(0.4, 1.0, size=(num_clusters, 1)), size=(num_clusters, size)).astype(float)


def test_interval_covers_the_truth_of_clustered_data_as_often_as_it_says():
    rng = np.random.default_rng(0)
    num_trials, by_cluster, by_pair = 400, 0, 0
    for trial in range(num_trials):
        flips = clustered_coin_flips(rng, num_clusters=80, size=12)
        sums = np.stack([flips.sum(axis=1), np.full(80, 12.0)], axis=1)
        (estimate,) = cluster_bootstrap(sums, mean, num_bootstrap=400, seed=trial)
        (naive,) = cluster_bootstrap(with_counts(flips.ravel()), mean, num_bootstrap=100, seed=trial)
        by_cluster += estimate.low <= 0.7 <= estimate.high
        by_pair += naive.low <= 0.7 <= naive.high
    # Binomial error of a coverage of 0.95 over 400 trials is 0.011; three of them, and 0.01 for 80 clusters being few.
    assert 0.905 <= by_cluster / num_trials <= 0.985
    assert by_pair / num_trials < 0.85


def test_one_cluster_has_no_uncertainty_to_report():
    assert cluster_bootstrap(np.array([[3.0, 4.0]]), mean, num_bootstrap=100, seed=0) == (Estimate(0.75, None, 1),)


def test_resamples_without_what_is_counted_are_left_out():
    def share(totals: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return totals[..., :1] / totals[..., 1:]

    sums = np.zeros((FEWEST_RESAMPLED, 2))
    sums[0] = 1.0, 2.0
    (estimate,) = cluster_bootstrap(sums, share, num_bootstrap=300, seed=0)
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)


def test_the_mean_s_interval_is_student_s():
    samples = np.random.default_rng(0).normal(size=7)
    low, high = student.interval(0.95, 6, samples.mean(), samples.std(ddof=1) / math.sqrt(7))
    estimate = student_mean(samples)
    assert (estimate.low, estimate.high, estimate.num_samples) == (pytest.approx(low), pytest.approx(high), 7)
    assert student_mean(samples[:1]) == Estimate(float(samples[0]), None, 1)
    biased = student_mean(samples, bias=4.0)
    assert biased.standard_error == pytest.approx(math.hypot(estimate.standard_error, 4.0))


def test_intervals_reduce_to_student_s_where_only_seeds_or_only_prompts_vary():
    per_seed = np.array([0.1, 0.2, 0.6])
    seeds = crossed_mean(per_seed, 0.0, 50).estimate
    half = student.ppf(0.975, 2) * per_seed.std(ddof=1) / math.sqrt(3)
    assert (seeds.low, seeds.high) == pytest.approx((0.3 - half, 0.3 + half))
    prompts = crossed_mean(np.full(3, 0.3), 0.05, 50).estimate
    assert prompts.high - 0.3 == pytest.approx(student.ppf(0.975, 49) * 0.05)


@pytest.mark.parametrize(
    ("seed_std", "prompt_std"),
    [
        pytest.param(0.0, 1.0, marks=pytest.mark.slow),
        (0.1, 0.2),
        (0.3, 1.0),
        pytest.param(0.1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_intervals_hold_the_truth_at_least_as_often_as_they_say(seed_std, prompt_std):
    rng = np.random.default_rng(3)
    repetitions, truth, held = 1500, 0.7, 0
    for _ in range(repetitions):
        table = truth + rng.normal(0, seed_std, (SEEDS, 1)) + rng.normal(0, prompt_std, (1, PROMPTS))
        table += rng.normal(0, 0.5, (SEEDS, PROMPTS))
        prompt_error = table.mean(axis=0).std(ddof=1) / math.sqrt(PROMPTS)
        estimate = crossed_mean(table.mean(axis=1), prompt_error, PROMPTS).estimate
        held += estimate.low <= truth <= estimate.high
    assert held / repetitions > 0.95 - 3 * math.sqrt(0.95 * 0.05 / repetitions)


@pytest.mark.parametrize("num_clusters", [2, 3, 5, 8, 19])
def test_intervals_of_few_clusters_hold_the_truth(num_clusters):
    rng, held, repetitions = np.random.default_rng(num_clusters), 0, 500
    for _ in range(repetitions):
        shares = rng.normal(0.3, 0.7, (num_clusters, 1)) + rng.normal(0, 1, (num_clusters, 12))
        sums = np.stack([shares.sum(axis=1), np.full(num_clusters, 12.0)], axis=1)
        (found,) = cluster_bootstrap(sums, mean, num_bootstrap=100, seed=0)
        held += found.low <= 0.3 <= found.high
    assert held / repetitions > 0.95 - 3 * math.sqrt(0.95 * 0.05 / repetitions)


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_two_equal_seeds_give_no_narrower_interval_than_prompts_alone(num_seeds):
    rng = np.random.default_rng(0)
    margins = np.tile(rng.normal(0.5, 1, 60), (num_seeds, 1)) + rng.normal(0, 0.5, (num_seeds, 60))
    margins -= margins.mean(axis=1, keepdims=True) - 0.5
    prompts = [f"{i}" for i in range(60)]
    over_seeds = PairedScores(margins, None, prompts).effect("nll")
    alone = student_mean(np.logaddexp(0, -margins).mean(axis=0))
    assert over_seeds.high - over_seeds.low >= alone.high - alone.low - 1e-12


def test_an_interval_over_seeds_stays_inside_the_scores_range():
    margins = np.array([[3.0] * 9 + [-3.0], [-3.0] * 9 + [3.0]])
    for score in ("accuracy", "brier", "ece"):
        found = PairedScores(margins, None, [f"{i}" for i in range(10)]).effect(score)
        assert 0 <= found.low <= found.high <= 1
