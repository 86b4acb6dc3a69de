"""Readiness by the authors' weights: their example, clamps, recommendations and refusals."""

from __future__ import annotations

import math

import pytest

from rm_optimizer import RLReadinessReport, RLReadinessScorer
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.readiness.report import ReadinessVerdict

GOOD = {"accuracy": 0.95, "ece": 0.01, "reward_variance": 0.5, "top_eigenvalue": 50.0}


def test_the_authors_example_is_acceptable():
    report = RLReadinessScorer().compute_score(0.87, 0.05, 1.2, 150)
    assert round(report.score.value, 3) == 0.789
    assert report.verdict is ReadinessVerdict.acceptable
    assert report.recommendations == ()
    assert "nothing validates them" in report.basis


@pytest.mark.parametrize(
    ("change", "name", "component"),
    [
        ({"accuracy": 1.0}, "accuracy", 0.35),
        ({"accuracy": 1.3}, "accuracy", 0.35),
        ({"accuracy": 0.0}, "accuracy", 0.0),
        ({"ece": 0.2}, "calibration", 0.0),
        ({"ece": 0.9}, "calibration", 0.0),
        ({"reward_variance": 0.0}, "stability", 0.25),
        ({"reward_variance": 3.0}, "stability", 0.0),
        ({"reward_variance": 99.0}, "stability", 0.0),
        ({"top_eigenvalue": 0.0}, "landscape", 0.15),
        ({"top_eigenvalue": -5.0}, "landscape", 0.15),
        ({"top_eigenvalue": 1e6}, "landscape", 0.0),
    ],
)
def test_every_component_stays_between_zero_and_its_weight(change, name, component):
    report = RLReadinessScorer().compute_score(**GOOD | change)
    assert report.components[name] == pytest.approx(component)
    assert report.score.value == pytest.approx(sum(report.components.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accuracy": 0.69}, "below 0.7"),
        ({"accuracy": 87.0}, "not a percentage"),
        ({"ece": 0.11}, "above 0.1"),
        ({"reward_variance": 2.1}, "above 2"),
        ({"top_eigenvalue": 201.0}, "above 200"),
    ],
)
def test_what_lies_beyond_a_limit_is_named(change, words):
    at_limit = {"accuracy": 0.7, "ece": 0.1, "reward_variance": 2.0, "top_eigenvalue": 200.0}
    assert RLReadinessScorer().compute_score(**at_limit).recommendations == ()
    (sentence,) = RLReadinessScorer().compute_score(**at_limit | change).recommendations
    assert words in sentence


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [
        (0.81, "ready"),
        (0.8, "acceptable with monitoring"),
        (0.6, "acceptable with monitoring"),
        (0.59, "not recommended"),
    ],
)
def test_limits_of_the_verdicts(accuracy, verdict):
    weights = {"accuracy": 1.0, "calibration": 0.0, "stability": 0.0, "landscape": 0.0}
    assert RLReadinessScorer(weights).compute_score(accuracy, 0.0, 1.0, 100.0).verdict == verdict


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.9%"])
def test_what_is_no_finite_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} must be (finite|a number), got"):
        RLReadinessScorer().compute_score(**GOOD | {name: value})


@pytest.mark.parametrize("change", [{"accuracy": -0.1}, {"ece": -0.1}, {"ece": 5.0}, {"reward_variance": -1.0}])
def test_impossible_numbers_are_refused(change):
    with pytest.raises(ConfigError, match=f"^{next(iter(change))} must (not be negative|lie in)"):
        RLReadinessScorer().compute_score(**GOOD | change)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"accuracy": 1.0}, "must name accuracy, calibration, stability, landscape, got accuracy"),
        ({"accuracy": 0.5, "calibration": 0.5, "stability": 0.5, "landscape": 0.5}, "must sum to 1, got 2"),
        ({"accuracy": 1.5, "calibration": -0.5, "stability": 0.0, "landscape": 0.0}, "must not be negative"),
        ({"accuracy": math.nan, "calibration": 0.5, "stability": 0.5, "landscape": 0.0}, "must be finite"),
    ],
)
def test_unusable_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        RLReadinessScorer(weights)


def test_report_is_read_as_it_was_written():
    report = RLReadinessScorer().compute_score(**GOOD)
    read = RLReadinessReport.from_json(report.to_json())
    assert read.to_json() == report.to_json()
    assert read.verdict is ReadinessVerdict.ready
