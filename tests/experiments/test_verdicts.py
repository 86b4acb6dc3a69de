"""Arms are called better, worse or equivalent as often as they are, and as rarely where they are not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rm_optimizer.core.metrics.effects import power
from rm_optimizer.core.metrics.intervals import crossed_mean
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.verdicts import FamilyOfTests, Verdict, judge

PAIRS = 40
NAMES = [f"prompt {i}" for i in range(PAIRS)]


def arm(rng: np.random.Generator, seeds: int = 4, shift: float = 0.0) -> np.ndarray:
    return rng.normal(0.5 + shift, 1.0, (seeds, PAIRS))


def primary(verdicts: tuple[Verdict, ...]) -> dict[str, Verdict]:
    return {each.arm: each for each in verdicts if each.is_primary}


def test_planted_differences_are_named_and_equal_arms_are_equivalent():
    rng = np.random.default_rng(0)
    reference = arm(rng)
    arms = {"adamw": reference, "same": reference.copy(), "good": reference + 1.0, "bad": reference - 1.0}
    verdicts = judge(arms | {"noise": arm(rng)}, NAMES)
    found = primary(verdicts)
    words = {"same": "equivalent", "good": "better", "bad": "worse", "noise": "inconclusive"}
    assert {name: each.verdict for name, each in found.items()} == words
    assert found["good"].difference.value < 0 < found["bad"].difference.value
    assert found["good"].holm_p > found["good"].p_value
    assert (found["same"].power, found["same"].detectable, found["same"].equivalence_p) == (1.0, 0.0, 0.0)
    accuracy = {each.arm: each for each in verdicts if each.score == "accuracy"}
    assert accuracy["good"].verdict == "better"
    assert accuracy["good"].difference.value > 0
    assert accuracy["good"].holm_p is None
    assert [each.is_primary for each in verdicts] == [True] * 4 + [False] * 12
    assert Verdict.from_json(verdicts[0].to_json()) == verdicts[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"reference": "adam"}, "unknown reference 'adam'; did you mean 'adamw'"),
        ({"arms": {"adamw": np.zeros((2, PAIRS))}}, "needs another arm than the reference adamw"),
        ({"arms": {"adamw": np.zeros((1, PAIRS)), "lion": np.zeros((1, PAIRS))}}, "at least two common seeds, got 1"),
        ({"arms": {"adamw": np.zeros((2, PAIRS)), "lion": np.zeros((3, PAIRS))}}, "margins of the same seeds"),
    ],
)
def test_arms_that_cannot_be_judged_are_refused(change, sentence):
    arms = change.pop("arms", {"adamw": np.zeros((2, PAIRS)), "lion": np.zeros((2, PAIRS))})
    with pytest.raises(ConfigError, match=sentence):
        judge(arms, NAMES, **change)


def studies(truth: float, *, seeds: int, arms: int, repetitions: int, margin: float = 0.01) -> list[FamilyOfTests]:
    """Tests of simulated studies whose challengers share the reference's noise over seeds; accuracies in points."""
    rng = np.random.default_rng(5)
    noise = rng.normal(0.0, 0.008, (repetitions, arms, seeds)) - rng.normal(0.0, 0.008, (repetitions, 1, seeds))
    return [
        FamilyOfTests.of([crossed_mean(truth + each, 0.0, 1) for each in study], margin, corrected=True)
        for study in noise
    ]


def share(found: list[FamilyOfTests], word: str) -> float:
    """Share of studies in which at least one challenger gets the word."""
    return float(
        np.mean([any(each.outcome(i, "accuracy") == word for i in range(len(each.different))) for each in found])
    )


def test_of_four_equal_challengers_one_is_called_different_as_rarely_as_it_says():
    found = studies(0.0, seeds=5, arms=4, repetitions=500)
    wrong = share(found, "better") + share(found, "worse")
    assert 0.01 < wrong <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 500)


def test_two_points_are_found_with_the_stated_power():
    found = studies(0.02, seeds=5, arms=1, repetitions=500, margin=0.02)
    expected = power(0.02, 0.008 * math.sqrt(2 / 5), 4)
    assert expected == pytest.approx(0.835, abs=0.001)
    assert share(found, "better") == pytest.approx(expected, abs=3 * math.sqrt(0.84 * 0.16 / 500))
    assert np.median([each.power(0) for each in found]) == pytest.approx(expected, abs=0.1)


def test_a_difference_of_the_margin_is_called_equivalent_as_rarely_as_it_says():
    found = studies(-0.01, seeds=8, arms=3, repetitions=500)
    assert share(found, "equivalent") <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 500)
    assert share(studies(0.0, seeds=20, arms=1, repetitions=100, margin=0.02), "equivalent") > 0.9
