"""The fitted forms have the coefficients, peak and gamma of curves that are known, and a fall is not invented."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling import OveroptimizationCurve
from rm_optimizer.rl_coupling.overoptimization import Optimization, fitted_gain

NATS = [0.0, 0.25, 1.0, 2.0, 4.0, 7.0, 10.0]
D = np.sqrt(NATS)


def checkpoints(alpha: float, beta: float, noise: float, num_prompts: int = 60, seed: int = 0) -> np.ndarray:
    gain = fitted_gain(D, alpha, beta, Optimization.rl)
    return 5 + gain + noise * np.random.default_rng(seed).normal(size=(num_prompts, len(D)))


def test_a_run_of_the_exact_form_gives_its_coefficients_peak_and_gamma():
    proxy, gold = checkpoints(2.0, 0.3, 0.0), checkpoints(1.2, 0.8, 0.0)
    curve = OveroptimizationCurve.of_checkpoints(NATS, proxy, gold, num_bootstrap=50)
    assert (curve.fit.alpha.value, curve.fit.beta.value) == pytest.approx((1.2, 0.8))
    assert (curve.fit.proxy_alpha.value, curve.fit.proxy_beta.value) == pytest.approx((2.0, 0.3))
    assert curve.fit.residual < 1e-12
    peak = math.exp(1.2 / 0.8 - 1)
    assert curve.peak_distance.value == pytest.approx(peak)
    assert curve.peak_gain.value == pytest.approx(0.8 * peak)

    def gold_gain(d: float) -> float:
        return d * (1.2 - 0.8 * math.log(d))

    apart = quad(lambda d: abs(gold_gain(d) - d * (2.0 - 0.3 * math.log(d))), 1e-12, D[-1])[0]
    assert curve.gamma.value == pytest.approx(apart / quad(gold_gain, 1e-12, D[-1])[0], rel=1e-3)


def test_the_coefficients_intervals_hold_the_truth_as_often_as_they_say():
    held = []
    for seed in range(60):
        proxy, gold = checkpoints(2.0, 0.3, 0.5, seed=seed), checkpoints(1.2, 0.8, 1.0, seed=1000 + seed)
        fit = OveroptimizationCurve.of_checkpoints(NATS, proxy, gold, num_bootstrap=200, seed=seed).fit
        for estimate, truth in ((fit.alpha, 1.2), (fit.beta, 0.8)):
            assert estimate.low is not None
            assert estimate.high is not None
            held.append(estimate.low <= truth <= estimate.high)
    assert 0.87 <= np.mean(held) <= 1.0


def test_a_fall_is_found_where_there_is_one():
    curve = OveroptimizationCurve.of_checkpoints(NATS, checkpoints(2.0, 0.3, 0.1), checkpoints(1.0, 1.2, 0.5))
    assert curve.turning_point == pytest.approx(1.0)
    assert curve.fall.low is not None
    assert curve.fall.low > 0
    again = OveroptimizationCurve.from_json(curve.to_json())
    assert again == curve


def test_a_flat_gold_reward_is_not_said_to_fall_more_often_than_stated():
    found = [
        OveroptimizationCurve.of_checkpoints(
            NATS, checkpoints(2.0, 0.3, 0.1), checkpoints(0.0, 0.0, 1.0, seed=seed), num_bootstrap=200, seed=seed
        ).turning_point
        is not None
        for seed in range(200)
    ]
    assert np.mean(found) < 0.025 + 3 * math.sqrt(0.025 * 0.975 / 200)


@pytest.mark.parametrize(
    "means", [(0, -2, -2, -2, -2, -2, -2), (0, -3, -2.5, -2, -1.5, -1, -1), (0, -1, -2, -3, -4, -5, -6)]
)
def test_a_gold_reward_that_is_highest_at_the_start_has_fallen_from_there(means):
    gold = np.array(means) + np.random.default_rng(0).normal(0, 0.1, size=(128, 7))
    curve = OveroptimizationCurve.of_checkpoints(NATS, checkpoints(2.0, 0.3, 0.1, 128), gold, num_bootstrap=20)
    assert curve.turning_point == 0.0
    assert curve.fall.value == pytest.approx(-means[-1], abs=0.1)
    assert "highest at the start and then falls" in curve.verdict("the last checkpoint")


def test_selection_against_the_gold_reward_falls_from_one_response():
    proxy = np.random.default_rng(0).normal(size=(64, 64))
    curve = OveroptimizationCurve.of_best_of_n(proxy, -proxy, num_bootstrap=20)
    assert curve.turning_point == 0.0
    assert curve.fall.value == pytest.approx(2.38, abs=0.15)


@pytest.mark.parametrize("fall", [0.05, 0.1, 0.2])
def test_a_fall_has_an_interval_only_where_it_was_measured_and_it_holds_the_truth(fall):
    rng = np.random.default_rng(0)
    means = np.array([0, 0.5, 1, 1, 1, 1, 1 - fall])
    found = [
        OveroptimizationCurve.of_checkpoints(
            NATS, *(means + rng.normal(0, 1, size=(2, 256, 7))), num_bootstrap=2, seed=seed
        ).fall
        for seed in range(200)
    ]
    assert all(each.low is None or each.low < each.high for each in found)
    held = [each.low <= fall <= each.high for each in found if each.low is not None]
    assert np.mean(held) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(held))


def test_a_rising_gold_reward_has_its_peak_at_the_end():
    curve = OveroptimizationCurve.of_checkpoints(NATS, checkpoints(2.0, 0.1, 0.1), checkpoints(1.0, -0.1, 0.1))
    assert curve.peak_distance.value == D[-1]
    assert curve.turning_point is None
    falling = OveroptimizationCurve.of_checkpoints(NATS, checkpoints(2.0, 0.1, 0.1), -checkpoints(1.0, -0.1, 0.1))
    assert falling.peak_distance.value < 1e-3
    assert math.isnan(falling.gamma.value)


def test_best_of_n_does_not_depend_on_zero_and_unit_of_a_reward():
    rng = np.random.default_rng(0)
    proxy, noise = rng.normal(size=(2, 200, 64))
    gold = proxy - 0.4 * proxy**2 + noise
    first = OveroptimizationCurve.of_best_of_n(proxy, gold, num_bootstrap=100)
    second = OveroptimizationCurve.of_best_of_n(7 * proxy - 3, 0.1 * gold + 2, num_bootstrap=100)
    assert first.peak_distance.value == pytest.approx(second.peak_distance.value)
    assert first.points[-1].gold.value == pytest.approx(second.points[-1].gold.value)
    assert first.points[0].distance == first.points[0].gold.value == 0.0
    assert first.turning_point is not None
    assert first.points[-1].proxy.value == pytest.approx(2.36, abs=0.2)  # of the largest of 64 normal numbers


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.of_checkpoints(NATS[:-1], *np.ones((2, 3, 7))), DataError, "a divergence for each of the 7"),
        (lambda c: c.of_checkpoints(NATS[::-1], *np.ones((2, 3, 7))), DataError, "from 0 on"),
        (lambda c: c.of_checkpoints([0.0, 1.0, 2.0], *np.ones((2, 3, 3))), ConfigError, "at least 3 points"),
        (
            lambda c: c.of_checkpoints(NATS, *np.ones((2, 3, 7)), scales=(0.0, 1.0)),
            ConfigError,
            "scales must be positive",
        ),
        (lambda c: c.of_checkpoints(NATS, *np.full((2, 3, 7), np.nan)), DataError, "got nan in prompt 1, sample 1"),
        (lambda c: c.of_best_of_n(*np.ones((2, 3, 16))), DataError, "the proxy reward is the same for all responses"),
        (
            lambda c: c.of_best_of_n(np.arange(48.0).reshape(3, 16), np.ones((3, 16))),
            DataError,
            "the gold reward is the same for all responses",
        ),
        (lambda c: c.of_best_of_n(*np.ones((2, 3, 1))), DataError, "at least 2 responses"),
        (lambda c: c.of_best_of_n(*np.random.rand(2, 3, 4)), ConfigError, "at least 3 points"),  # noqa: NPY002
    ],
)
def test_wrong_input_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call(OveroptimizationCurve)
