"""Aggregates over data sets are those of their published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, trim_mean

from rm_optimizer.core.metrics.effects import interquartile_mean, probability_of_improvement
from rm_optimizer.errors import ConfigError

DRAWS = {"num_bootstrap": 400, "seed": 0}


@pytest.mark.parametrize("shape", [(3, 4), (4, 5), (7, 3)])
def test_the_interquartile_mean_is_the_trimmed_mean_of_all_runs(shape):
    scores = np.random.default_rng(0).normal(size=shape)
    found = interquartile_mean(scores, **DRAWS)
    assert found.value == pytest.approx(trim_mean(scores, 0.25, axis=None))
    assert found.low < found.value < found.high


def test_one_run_gone_wrong_does_not_move_the_interquartile_mean():
    scores = np.random.default_rng(0).normal(size=(3, 8))
    broken = scores.copy()
    broken[0, scores[0].argmin()] = -1e6
    assert interquartile_mean(broken, **DRAWS).value == pytest.approx(
        interquartile_mean(scores, **DRAWS).value, abs=0.2
    )


def test_the_probability_of_improvement_is_the_mean_mann_whitney_statistic():
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 6, (4, 5)).astype(float), rng.integers(0, 6, (4, 3)).astype(float)  # with ties
    expected = np.mean([mannwhitneyu(x, y).statistic / 15 for x, y in zip(first, second, strict=True)])
    found = probability_of_improvement(first, second, **DRAWS)
    assert found.value == pytest.approx(expected)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert probability_of_improvement(second, first, **DRAWS).value == pytest.approx(1 - expected)
    assert probability_of_improvement(first, first, **DRAWS).value == pytest.approx(0.5)


def test_seeds_are_drawn_within_their_data_set():
    scores = np.repeat(np.array([[0.0], [1.0], [5.0], [9.0]]), 4, axis=1)  # no spread over seeds
    found = interquartile_mean(scores, **DRAWS)
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((2, 5), (2, 5)), "at least 3 data sets, got 2"),
        (((3, 1), (3, 5)), "at least two seeds on each data set, got 1"),
        (((3, 5), (4, 5)), "the same data sets, got 3 and 4"),
    ],
)
def test_too_little_for_an_aggregate_is_refused(shapes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        probability_of_improvement(*map(np.zeros, shapes), **DRAWS)
