"""The loss barrier between two models, and its interval over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.landscape.series import barrier_of

WAY = np.linspace(0, 1, 11)


def sums(curve: np.ndarray, *, num_prompts: int = 60, seed: int = 0, noise: float = 0.3) -> np.ndarray:
    """Totals of prompts whose ends differ at random, with a bump of random height between them, and weights of 1."""
    first, second, bump = noise * np.random.default_rng(seed).standard_normal((3, num_prompts, 1))
    losses = 0.7 + curve + first * (1 - WAY) + second * WAY + 1.4 * bump * WAY * (1 - WAY)
    return np.column_stack([losses, np.ones(num_prompts)])


def test_the_barrier_is_the_largest_loss_less_the_larger_end():
    exact = barrier_of(sums(0.2 * WAY * (1 - WAY) + 0.01 * WAY, noise=0.0), seed=0)
    assert exact.value == pytest.approx(0.2 * 0.25 + 0.005 - 0.01)
    assert (exact.low, exact.high) == pytest.approx((exact.value, exact.value))
    downhill = barrier_of(sums(-0.5 * WAY, noise=0.0), seed=0)
    assert (downhill.value, downhill.low, downhill.high) == (0.0, 0.0, 0.0)


def test_the_interval_holds_a_barrier_that_the_sample_may_not_show():
    truth, draws = 0.01, [sums(0.04 * WAY * (1 - WAY), seed=seed) for seed in range(60)]
    found = [barrier_of(each, seed=1, num_bootstrap=100) for each in draws]
    held = [each.low <= truth <= each.high for each in found]
    assert np.mean(held) >= 0.75  # 0.84 of many draws; that of the barrier clipped at 0 before resampling, 0.29
    unseen = [each for each in found if each.value == 0]
    assert unseen
    assert all(each.low == 0 for each in unseen)
    assert np.mean([each.high > 0 for each in unseen]) > 0.5
