"""Calibration is judged from both sides of a pair, against its own noise, and a temperature only where one exists."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit

from rm_optimizer.core.metrics.calibration import (
    NUM_BINS,
    calibration_noise_floor,
    equal_mass_bins,
    equal_width_bins,
    expected_calibration_error,
    fit_temperature,
    fold,
    reliability_curve,
)


def simulated(num_pairs: int, *, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, hard labels drawn from them, and unit weights; the model then says `scale` times the true logit."""
    rng = np.random.default_rng(seed)
    true_logit = rng.normal(scale=1.5, size=num_pairs)
    label = (rng.random(num_pairs) < expit(true_logit)).astype(np.float64)
    return scale * true_logit, label, np.ones(num_pairs)


def ece(logit: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    folded = fold(logit, label, weight)
    return expected_calibration_error(folded, equal_width_bins(folded.confidence))


def brute_force_symmetrized_ece(logit: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    p = np.concatenate([expit(logit), expit(-logit)])
    y, w = np.concatenate([label, 1 - label]), np.concatenate([weight, weight])
    total = 0.0
    for k in range(2 * NUM_BINS):
        inside = (p >= k / (2 * NUM_BINS)) & ((p < (k + 1) / (2 * NUM_BINS)) | (k == 2 * NUM_BINS - 1))
        if inside.any():
            gap = np.average(p[inside], weights=w[inside]) - np.average(y[inside], weights=w[inside])
            total += abs(gap) * w[inside].sum() / w.sum()
    return total


def test_equals_the_error_of_the_set_with_every_pair_from_both_sides():
    rng = np.random.default_rng(1)
    logit, _, _ = simulated(300, scale=2.0)
    logit[:10] = 0.0
    label, weight = rng.random(300), rng.uniform(0.5, 2.0, size=300)
    assert ece(logit, label, weight) == pytest.approx(brute_force_symmetrized_ece(logit, label, weight), rel=1e-12)


def test_a_calibrated_model_has_no_error_beyond_the_noise_floor_though_every_label_is_one():
    logit, label, weight = simulated(40_000)
    logit = np.where(label == 1, logit, -logit)
    folded = fold(logit, np.ones_like(label), weight)
    bins = equal_width_bins(folded.confidence)
    floor = calibration_noise_floor(folded, bins, seed=0)
    measured = expected_calibration_error(folded, bins)
    assert measured < 2 * floor < 0.02
    # A one-sided error, which takes sigmoid of the margin against labels that are all 1, is far off.
    assert np.mean(1 - expit(logit)) > 0.25


def test_invariant_to_which_response_is_called_chosen():
    logit, label, weight = simulated(500, scale=1.7)
    turned = np.where(np.arange(500) % 2 == 0, 1.0, -1.0)
    label = 0.8 * label + 0.1
    turned_label = np.where(turned > 0, label, 1 - label)
    assert ece(turned * logit, turned_label, weight) == pytest.approx(ece(logit, label, weight), rel=1e-12)
    assert fit_temperature(turned * logit, turned_label, weight).temperature == pytest.approx(
        fit_temperature(logit, label, weight).temperature, rel=1e-9
    )


def test_a_constant_confidence_has_its_gap_as_error():
    logit = np.full(10, math.log(0.9 / 0.1))
    label = np.array([1.0] * 6 + [0.0] * 4)
    folded = fold(logit, label, np.ones(10))
    assert ece(logit, label, np.ones(10)) == pytest.approx(0.3)
    mass = equal_mass_bins(folded.confidence, folded.weight)
    assert expected_calibration_error(folded, mass) == pytest.approx(0.3)


def test_equal_mass_bins_hold_equal_weight_and_never_part_equal_values():
    confidence = np.linspace(0.5, 1.0, 200)
    assert np.bincount(equal_mass_bins(confidence, np.ones(200))).tolist() == [20] * NUM_BINS
    tied = np.repeat([0.6, 0.7], 50)
    bins = equal_mass_bins(tied, np.ones(100))
    assert len(set(bins[:50])) == len(set(bins[50:])) == 1


def test_both_binnings_take_a_weight_for_a_repetition():
    logit, label, _ = simulated(200, scale=2.0)
    counts = np.random.default_rng(2).integers(1, 4, size=200)
    weighted = fold(logit, label, counts.astype(np.float64))
    repeated = fold(np.repeat(logit, counts), np.repeat(label, counts), np.ones(counts.sum()))
    for bins in (lambda pairs: equal_width_bins(pairs.confidence), lambda q: equal_mass_bins(q.confidence, q.weight)):
        assert expected_calibration_error(weighted, bins(weighted)) == pytest.approx(
            expected_calibration_error(repeated, bins(repeated)), rel=1e-12
        )


def test_noise_floor_of_one_confidence_is_the_mean_deviation_of_a_binomial():
    n, q = 400, 0.8
    folded = fold(np.full(n, math.log(q / (1 - q))), np.ones(n), np.ones(n))
    floor = calibration_noise_floor(folded, equal_width_bins(folded.confidence), seed=0)
    sigma = math.sqrt(q * (1 - q) / n)
    # E|N(0, s)| = s sqrt(2 / pi), and its standard error over 200 draws is s sqrt((1 - 2 / pi) / 200); four of them.
    assert floor == pytest.approx(sigma * math.sqrt(2 / math.pi), abs=4 * sigma * math.sqrt((1 - 2 / math.pi) / 200))


def test_noise_floor_depends_on_its_seed_alone(monkeypatch: pytest.MonkeyPatch):
    folded = fold(*simulated(50))
    bins = equal_width_bins(folded.confidence)
    floor = calibration_noise_floor(folded, bins, seed=0)
    monkeypatch.setattr("rm_optimizer.core.metrics.calibration._DRAWS_AT_ONCE", 333)
    assert calibration_noise_floor(folded, bins, seed=0) == pytest.approx(floor, rel=1e-12)
    assert calibration_noise_floor(folded, bins, seed=1) != floor


def test_reliability_curve_of_counted_pairs():
    logit = np.array([0.0, 0.1, -0.1, 3.0, 3.0, 3.0, -3.0])
    label = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    curve = reliability_curve(fold(logit, label, np.ones(7)))
    assert [(item.num_pairs, item.frequency) for item in curve] == [(3, 0.5), (4, 0.75)]
    assert [(round(item.low, 9), round(item.high, 9)) for item in curve] == [(0.5, 0.55), (0.95, 1.0)]
    assert curve[1].mean_confidence == pytest.approx(expit(3.0))
    assert all(item.frequency_low < item.frequency < item.frequency_high for item in curve)


def test_temperature_matches_a_direct_minimization_and_improves_the_likelihood():
    rng = np.random.default_rng(4)
    logit, label, _ = simulated(400, scale=3.0)
    label, weight = 0.9 * label + 0.05, rng.uniform(0.5, 2, size=400)

    def nll(log_temperature: float) -> float:
        z = logit / math.exp(log_temperature)
        return float(np.average(np.logaddexp(0, -z) + (1 - label) * z, weights=weight))

    best = minimize_scalar(nll, bounds=(-5, 5), method="bounded", options={"xatol": 1e-10})
    fit = fit_temperature(logit, label, weight)
    assert fit.reason is None
    assert fit.temperature == pytest.approx(math.exp(best.x), rel=1e-5)
    assert fit.nll == pytest.approx(best.fun, rel=1e-12)
    assert fit.nll < nll(0.0)


@pytest.mark.parametrize("scale", [1e-6, 0.5, 4.0, 1e6])
def test_temperature_undoes_a_scale(scale: float):
    base = fit_temperature(*simulated(2_000))
    scaled = fit_temperature(*simulated(2_000, scale=scale))
    assert base.temperature is not None
    # Standard error of log T at 2,000 pairs is about 0.04 here; three of them.
    assert base.temperature == pytest.approx(1.0, abs=0.12)
    assert scaled.temperature == pytest.approx(scale * base.temperature, rel=1e-9)


def test_equal_odds_have_a_temperature_in_closed_form():
    # Three of four right at one |logit| z: T = z / log 3.
    fit = fit_temperature(np.array([2.0, 2.0, -2.0, 2.0]), np.array([1.0, 1.0, 0.0, 0.0]), np.ones(4))
    assert fit.temperature == pytest.approx(2 / math.log(3), rel=1e-12)


def test_no_temperature_where_none_is_best():
    ones = np.ones(3)
    cases = {
        "ranked as labeled": (np.array([1.0, 2.0, -0.5]), np.array([1.0, 1.0, 0.0])),
        "do not agree with the labels": (np.array([-1.0, -2.0, 0.5]), np.array([1.0, 1.0, 1.0])),
        "every margin is zero": (np.zeros(3), np.array([1.0, 0.0, 0.7])),
    }
    for reason, (logit, label) in cases.items():
        fit = fit_temperature(logit, label, ones)
        assert fit.temperature is None
        assert fit.nll is None
        assert reason in (fit.reason or "")
