"""Area under the ROC curve and rates at thresholds, against pairs counted one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.core.metrics.separation import roc_auc, threshold_rates


def counted(better: np.ndarray, worse: np.ndarray, weight: np.ndarray) -> float:
    wins = 0.5 + 0.5 * np.sign(better[:, None] - worse[None, :])
    return float((np.outer(weight, weight) * wins).sum() / weight.sum() ** 2)


def test_the_area_is_the_share_of_ordered_responses():
    rng = np.random.default_rng(0)
    for _ in range(20):
        better, worse = rng.integers(0, 6, (2, 30)).astype(float)
        weight = rng.uniform(0.5, 2.0, 30)
        found = roc_auc(better, worse, weight, np.arange(30) // 3, with_interval=False)
        assert found.value == pytest.approx(counted(better, worse, weight), abs=1e-12)
        assert (found.num_samples, found.low) == (10, None)


def test_labels_swap_sides_and_ties_do_not_count():
    chosen, rejected = np.array([1.0, 0.0, 9.0]), np.array([0.0, 2.0, 9.0])
    metrics = evaluate_pairs(
        chosen,
        rejected,
        beta=1.0,
        label=np.array([1.0, 0.0, 0.5]),
        prompt_ids=list("abc"),
        thresholds=[1.5, -1],
        num_bootstrap=0,
        seed=0,
    )
    assert metrics.roc_auc.value == 1.0
    assert [(rates.tpr, rates.fpr, rates.fnr) for rates in metrics.threshold_rates] == [
        (0.5, 0.0, 0.5),
        (1.0, 1.0, 0.0),
    ]
    assert PairwiseMetrics.from_json(metrics.to_json()).threshold_rates == metrics.threshold_rates


def test_numbers_without_pairs_are_unknown_and_thresholds_are_finite():
    options = {"label": np.full(2, 0.5), "prompt_ids": ["a", "b"], "thresholds": [0], "num_bootstrap": 9, "seed": 0}
    ties = evaluate_pairs(np.ones(2), np.zeros(2), beta=1.0, **options)
    assert math.isnan(ties.roc_auc.value)
    assert math.isnan(ties.threshold_rates[0].tpr)
    with pytest.raises(ValueError, match="a threshold must be finite, got nan"):
        threshold_rates(np.ones(1), np.zeros(1), np.ones(1), [math.nan])


@pytest.mark.parametrize("num_prompts", [2, 3, 5, 8, 60])
def test_the_interval_covers_the_area(num_prompts: int):
    """Two pairs a prompt with a common level."""
    rng = np.random.default_rng(num_prompts)
    truth = float(norm.cdf(1.2 / np.sqrt(4.5)))  # a difference of two independent responses
    inside = 0
    for _ in range(400):
        level = np.repeat(rng.normal(0, 1, num_prompts), 2)
        better, worse = level + rng.normal(1.2, 1.118, 2 * num_prompts), level + rng.normal(0, 1.118, 2 * num_prompts)
        found = roc_auc(better, worse, np.ones(2 * num_prompts), np.arange(2 * num_prompts) // 2, with_interval=True)
        inside += found.low <= truth <= found.high
    assert inside / 400 > 0.93
