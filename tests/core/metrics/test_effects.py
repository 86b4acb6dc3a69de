"""Planted effects are found, planted nothing is not, and tests of many effects err as rarely as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm
from scipy.stats import t as student

from rm_optimizer.core.metrics.effects import (
    SCORES,
    PairedScores,
    detectable_effect,
    holm_adjusted,
    power,
)
from rm_optimizer.core.metrics.pairwise import evaluate_pairs
from studies.hypotheses import outcome

SEEDS, PROMPTS, PAIRS = 3, 60, 240
NAMES = [f"prompt {i % PROMPTS}" for i in range(PAIRS)]


def margins(seed: int, shift: float = 0.0) -> np.ndarray:
    """What prompts and pairs decide is shared; each (seed, pair) adds its own noise."""
    shared = np.random.default_rng(99).normal(0.5, 1.0, size=PAIRS)
    return shared + shift + np.random.default_rng(seed).normal(0.0, 0.3, size=(SEEDS, PAIRS))


@pytest.mark.parametrize("score", ["accuracy", "nll"])
def test_a_planted_effect_is_confirmed_its_reverse_refuted_and_nothing_undecided(score):
    found = {
        name: outcome(PairedScores(better, worse, NAMES).effect(score))
        for name, better, worse in (
            ("planted", margins(1, 1.0), margins(2)),
            ("reversed", margins(1), margins(2, 1.0)),
            ("nothing", margins(1), margins(2)),
        )
    }
    assert found == {"planted": "better", "reversed": "worse", "nothing": "inconclusive"}


def test_a_planted_calibration_effect_is_confirmed():
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 1.5, size=(SEEDS, 4000))
    calibrated = np.where(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), logits, -logits)
    names = [str(i) for i in range(4000)]
    estimate = PairedScores(calibrated, 4 * calibrated, names).effect("ece")
    assert outcome(estimate) == "better"
    assert outcome(PairedScores(4 * calibrated, calibrated, names).effect("ece")) == "worse"


def test_equal_arms_are_no_worse_than_each_other_with_certainty():
    estimate = PairedScores(margins(1), margins(1), NAMES).effect("accuracy")
    assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0)
    assert [outcome(estimate, margin) for margin in (0.0, 0.03)] == ["equivalent", "equivalent"]


@pytest.mark.parametrize("score", SCORES)
def test_two_models_differ_over_prompts_as_their_own_bootstrap_says(score):
    first, second = margins(1, 1.0)[:1], margins(2)[:1]
    effect = PairedScores(first, second, NAMES).effect(score, num_bootstrap=500)
    alone = evaluate_pairs(first[0], np.zeros(PAIRS), beta=1.0, prompt_ids=NAMES, num_bootstrap=500, seed=0)
    assert PairedScores(first, None, NAMES).effect(score, num_bootstrap=500).value == pytest.approx(
        getattr(alone, score).value
    )
    assert effect.low < effect.value < effect.high
    assert outcome(effect) == "better" or score == "ece"
    same = PairedScores(first, first, NAMES).effect(score, num_bootstrap=500)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("num_seeds", [1, 4])
def test_prompts_without_a_decided_pair_are_no_samples_of_an_accuracy(num_seeds):
    better, worse = margins(1)[:num_seeds], margins(2)[:num_seeds]
    alone = PairedScores(better, worse, NAMES, label=np.ones(PAIRS)).effect("accuracy", num_bootstrap=50)
    both = PairedScores(
        *(np.pad(arm, ((0, 0), (0, 30))) for arm in (better, worse)),
        [*NAMES, *(f"undecided {i}" for i in range(30))],
        label=np.pad(np.ones(PAIRS), (0, 30), constant_values=0.5),
    ).effect("accuracy", num_bootstrap=50)
    assert both == alone


def test_models_that_rank_every_pair_alike_may_still_differ_elsewhere():
    effect = PairedScores(margins(1)[:1], 2 * margins(1)[:1], NAMES).effect("accuracy", num_bootstrap=500)
    assert effect.value == 0.0
    assert effect.low < 0.0 < effect.high


def test_one_seed_gives_no_interval_and_no_outcome():
    estimate = PairedScores(margins(1, 3.0)[:1], margins(2)[:1], NAMES).effect("nll")
    assert estimate.low is None
    assert outcome(estimate) == "inconclusive"


def test_adjusted_p_values_are_those_of_the_steps():
    p = np.array([0.02, 0.001, 0.04, 0.03, 0.9])
    # 5 x 0.001, 4 x 0.02, then 3 x 0.03 = 0.09, 2 x 0.04 = 0.08 raised to it, and the largest as it is
    assert holm_adjusted(p).tolist() == pytest.approx([0.08, 0.005, 0.09, 0.09, 0.9])
    assert holm_adjusted(np.array([0.03])).tolist() == [0.03]
    assert holm_adjusted(np.array([0.6, 0.7])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_a_family_of_true_hypotheses_is_rejected_as_rarely_as_it_says(shared):
    rng = np.random.default_rng(0)
    repetitions = 4000
    noise = rng.normal(size=(repetitions, 5)) * math.sqrt(1 - shared) + rng.normal(size=(repetitions, 1)) * math.sqrt(
        shared
    )
    p_values = 2 * norm.sf(np.abs(noise))
    plain = (p_values.min(axis=1) < 0.05).mean()
    adjusted = np.mean([(holm_adjusted(row) < 0.05).any() for row in p_values])
    assert adjusted <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repetitions)
    assert plain > adjusted


def test_a_false_hypothesis_is_found_once_the_others_are_out_of_the_way():
    assert (holm_adjusted(np.array([1e-6, 0.04])) < 0.05).all()  # Bonferroni would keep the second, 2 x 0.04
    assert not (holm_adjusted(np.array([0.03, 0.04])) < 0.05).any()


def test_power_is_that_of_published_tables():
    # Paired t tests, two-sided 5 %: 34 pairs find d = 0.5 with 0.808 (Faul et al., 2007, G*Power 3).
    assert power(0.5, 1 / math.sqrt(34), 33) == pytest.approx(0.808, abs=5e-4)
    assert power(0.0, 1.0, 4) == pytest.approx(0.05)
    assert power(-0.5, 1 / math.sqrt(34), 33) == pytest.approx(power(0.5, 1 / math.sqrt(34), 33))
    assert power(2.0, 1.0, 1e7) == pytest.approx(norm.sf(1.959964 - 2) + norm.cdf(-1.959964 - 2), abs=1e-5)


def test_power_is_the_share_of_intervals_that_exclude_zero():
    rng = np.random.default_rng(1)
    samples = rng.normal(0.8, 1.0, size=(20_000, 8))
    statistic = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / math.sqrt(8))
    share = (np.abs(statistic) > student.ppf(0.975, 7)).mean()
    assert share == pytest.approx(power(0.8, 1 / math.sqrt(8), 7), abs=3 * math.sqrt(0.25 / 20_000))


@pytest.mark.parametrize("freedom", [1, 2, 4, 30, 10_000])
def test_the_detectable_effect_is_found_with_the_wanted_power(freedom):
    assert power(detectable_effect(0.02, freedom), 0.02, freedom) == pytest.approx(0.8)


def test_of_many_samples_the_detectable_effect_is_the_normal_one():
    assert detectable_effect(0.1, 1e6) == pytest.approx(0.1 * (norm.ppf(0.975) + norm.ppf(0.8)), rel=1e-4)


def trained(rng: np.random.Generator, prompts: np.ndarray, seeds: int, shift: float) -> np.ndarray:
    """Margins of an arm on two pairs of each prompt: effects of prompts, of seeds, and of each pair and seed."""
    own = prompts + rng.normal(0.0, 0.5, len(prompts)) + shift + rng.normal(0.0, 0.2, (seeds, 1))
    return np.repeat(own, 2, axis=1) + rng.normal(0.0, 0.5, (seeds, 2 * len(prompts)))


@pytest.mark.parametrize(("seeds", "num_prompts"), [pytest.param(3, 60, marks=pytest.mark.slow), (5, 30)])
def test_intervals_over_seeds_and_prompts_hold_the_truth_as_often_as_they_say(seeds, num_prompts):
    rng, shift, repetitions = np.random.default_rng(0), 0.2, 1000
    names = [str(i // 2) for i in range(2 * num_prompts)]
    # a margin is normal, so its chance to be positive is known: variances 1 and 0.25 of prompts, 0.04 and 0.25
    spread = math.sqrt(1 + 0.25 + 0.04 + 0.25)
    truth = norm.cdf((0.5 + shift) / spread) - norm.cdf(0.5 / spread)
    held = 0
    for _ in range(repetitions):
        prompts = rng.normal(0.5, 1.0, num_prompts)
        arms = [trained(rng, prompts, seeds, each) for each in (shift, 0.0)]
        effect = PairedScores(*arms, names).effect("accuracy")
        held += effect.low <= truth <= effect.high
    # 0.95 ± 0.02, and two standard errors of a share of 1,000 studies
    assert 0.93 - 0.014 <= held / repetitions <= 0.97 + 0.014
