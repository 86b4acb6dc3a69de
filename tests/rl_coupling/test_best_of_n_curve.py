"""The curve is the mean over all subsets of the pool, and its divergence that of the selected distribution."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling import BestOfNCurve
from rm_optimizer.rl_coupling.best_of_n_curve import (
    exact_divergence,
    kl_bound,
    pool_divergence,
    require_both,
    selected_means,
)


def brute_force(proxy: np.ndarray, gold: np.ndarray, n: int) -> float:
    """Mean over all subsets of the mean gold reward of the responses with the highest proxy."""
    means = []
    for subset in map(list, itertools.combinations(range(len(proxy)), n)):
        best = proxy[subset] == proxy[subset].max()
        means.append(gold[subset][best].mean())
    return math.fsum(means) / len(means)


@settings(max_examples=60)
@given(
    st.integers(1, 9).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(0, 4), min_size=size, max_size=size),
            st.lists(st.floats(-5, 5), min_size=size, max_size=size),
        )
    )
)
def test_the_estimator_is_the_mean_over_all_subsets(rewards):
    proxy, gold = (np.array(column, dtype=float) for column in rewards)
    sizes = list(range(1, len(proxy) + 1))
    found = selected_means(proxy[None], [proxy[None], gold[None]], sizes)
    for index, n in enumerate(sizes):
        assert found[1, 0, index] == pytest.approx(brute_force(proxy, gold, n), abs=1e-10)
        assert found[0, 0, index] == pytest.approx(brute_force(proxy, proxy, n), abs=1e-10)


def test_a_large_pool_keeps_the_weights_and_takes_no_time():
    num, sizes = 16_384, [2**k for k in range(15)]
    ranks = np.random.default_rng(0).permutation(num)[None].astype(float)
    before = time.process_time()
    (means,) = selected_means(ranks, [ranks + 1], sizes)
    assert time.process_time() - before < 10
    expected = [n * (num + 1) / (n + 1) for n in sizes]  # mean of the largest of n of 1 … N without replacement
    assert means[0] == pytest.approx(expected, rel=1e-11)


def test_the_curve_starts_at_the_policy_and_ends_at_the_best_of_the_pool():
    rng = np.random.default_rng(1)
    proxy, gold = rng.normal(size=(2, 30, 12))
    curve = BestOfNCurve.measure(proxy, gold, num_bootstrap=200)
    first, last = curve.points[0], curve.points[-1]
    assert [point.n for point in curve.points] == [1, 2, 4, 8, 12]
    assert first.proxy.value == pytest.approx(proxy.mean())
    assert first.gold is not None
    assert first.gold.value == pytest.approx(gold.mean())
    assert (first.kl_bound, first.kl_pool) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert last.proxy.value == pytest.approx(proxy.max(axis=1).mean())
    assert all(a.proxy.value < b.proxy.value for a, b in itertools.pairwise(curve.points))
    assert last.proxy.low is not None
    assert last.proxy.low < last.proxy.value
    assert BestOfNCurve.from_json(curve.to_json()) == curve


def test_the_estimate_does_not_change_with_order_or_a_monotone_proxy():
    rng = np.random.default_rng(2)
    proxy, gold = rng.normal(size=(2, 5, 20))
    order = rng.permutation(20)
    same = selected_means(np.exp(3 * proxy[:, order]), [gold[:, order]], [1, 3, 9])
    assert selected_means(proxy, [gold], [1, 3, 9]) == pytest.approx(same)


def test_the_divergence_is_that_of_simulated_selection():
    rng = np.random.default_rng(3)
    probabilities, rewards, n = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.0, 1.0, 1.0, 2.0]), 4
    drawn = rng.choice(4, size=(200_000, n), p=probabilities)
    keys = rewards[drawn] + rng.random(drawn.shape) * 1e-6
    selected = drawn[np.arange(len(drawn)), keys.argmax(axis=1)]
    share = np.bincount(selected, minlength=4) / len(drawn)
    assert exact_divergence(probabilities, rewards, n) == pytest.approx(
        float((share * np.log(share / probabilities)).sum()), abs=0.01
    )


def test_the_bound_holds_and_is_reached_without_ties():
    many = np.arange(65_536.0)
    assert pool_divergence(many, [16, 256]) == pytest.approx([kl_bound(16), kl_bound(256)], abs=2e-3)
    few = np.arange(16.0)
    assert pool_divergence(few, [256])[0] <= math.log(16) < kl_bound(256)
    for n in (1, 2, 8, 64):
        assert pool_divergence(np.repeat(few, 3), [n])[0] <= kl_bound(n) + 1e-12


@pytest.mark.parametrize(
    ("proxy", "options", "error", "says"),
    [
        (np.ones((2, 3)), {"sizes": [0]}, ConfigError, "sizes must lie in 1 … 3"),
        (np.ones((2, 3)), {"sizes": [4]}, ConfigError, "got 4"),
        (np.ones((2, 3)), {"sizes": []}, ConfigError, "got none"),
        (np.array([[1.0, np.nan]]), {}, DataError, "got nan in prompt 1, sample 2"),
        (np.ones((2, 3)), {"gold": np.full((2, 3), np.inf)}, DataError, "gold rewards must be finite"),
    ],
)
def test_wrong_rewards_are_refused(proxy, options, error, says):
    with pytest.raises(error, match=says):
        BestOfNCurve.measure(proxy, **options)


@pytest.mark.parametrize(
    ("proxy", "gold", "says"),
    [
        (np.ones(3), None, "shape"),
        (np.ones((2, 3)), np.ones((2, 2)), "expected a gold reward for each"),
    ],
)
def test_rewards_of_another_shape_are_refused(proxy, gold, says):
    with pytest.raises(DataError, match=says):
        require_both(proxy, gold)
