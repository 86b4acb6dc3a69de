"""Which evidence leads to which verdict, and what the report says about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import clustered_share
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.rl_coupling.readiness.fitted import (
    FitProvenance,
    FittedFeature,
    FittedOutcome,
    FittedReadiness,
    fitted_readiness,
)
from rm_optimizer.rl_coupling.readiness.probe import probe_questions
from rm_optimizer.rl_coupling.readiness.report import Algorithm, Evidence, ProbeRecord, ReadinessVerdict, conclude

TERMS = (
    FittedFeature("accuracy_relative", 0.5, 0.2, 0.5, 0.0, 1.0),
    FittedFeature("probe_64", 0.8, 0.2, 1.0, 0.4, 1.0),
)
OUTCOME = FittedOutcome("gold gain at KL 6", "sd", TERMS, 1.0, 0.3, (0.5, 1.0, 1.5), Estimate(0.7, 0.05, 6))
PROVENANCE = FitProvenance("on synthetic gold-reward worlds with tiny policies", (0,), (3,), 9, 9, "abc", "now", {})
FIT = FittedReadiness("1", dict.fromkeys(("bon", "rloo_kl", "grpo"), OUTCOME), PROVENANCE)


def probe(value, low, high, *, asked=256):
    return ProbeRecord(64, Estimate(value, 0.01, 64, low, high), asked, asked, 0, 256, "all 256 questions are asked")


def evidence(**features):
    measured = {"accuracy_relative": 0.5, "probe_64": 0.8, "reward_spread": 0.9, "tied_groups": 0.0} | features
    found = {name: Estimate(value, 0.01, 64) for name, value in measured.items() if value is not None}
    return Evidence(Algorithm.rloo_kl, found, (), (probe(measured["probe_64"] or 0.8, 0.6, 0.9),))


@pytest.mark.parametrize(
    ("features", "verdict", "words"),
    [
        ({"probe_64": 0.92}, ReadinessVerdict.ready, "1.60 [1.00, 2.20] sd, in the top quarter"),
        ({"probe_64": 0.84}, ReadinessVerdict.acceptable, "above the median"),
        ({"probe_64": 0.74}, ReadinessVerdict.not_recommended, "below the median"),
        ({"probe_64": 0.62}, ReadinessVerdict.not_recommended, "lowest quarter"),
    ],
)
def test_the_scores_place_in_the_study_decides(features, verdict, words):
    found = conclude(evidence(**features), FIT)
    assert found.verdict is verdict
    assert words in found.basis
    assert "tau 0.70 ± 0.05 on worlds that were not fitted" in found.cautions[-1]
    assert found.recommendations


def test_a_failed_gate_outweighs_the_score():
    failed = Check("padding", Status.fail, 1.0, "", "0", "padding changes rewards; pool by the attention mask")
    found = conclude(replace(evidence(probe_64=0.99), gates=(failed,)), FIT)
    assert found.verdict is ReadinessVerdict.not_recommended
    assert found.basis == "the check padding failed"
    assert found.recommendations[0] == "repair padding: padding changes rewards; pool by the attention mask"


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        (probe(0.52, 0.45, 0.59), ReadinessVerdict.not_recommended),
        (probe(0.3, 0.2, 0.4, asked=32), ReadinessVerdict.not_recommended),
        (probe(0.6, 0.4, 0.8), ReadinessVerdict.unknown),
        (probe(0.55, 0.4, 0.7), ReadinessVerdict.not_recommended),
        (probe(0.7, 0.55, 0.8, asked=32), ReadinessVerdict.ready),
    ],
)
def test_picks_hardly_above_chance_decide_and_wide_intervals_leave_it_open(record, verdict):
    found = conclude(replace(evidence(probe_64=0.95), probes=(record,)), FIT)
    assert found.verdict is verdict
    asks = any("answer more questions" in step for step in found.recommendations)
    assert asks == (verdict is ReadinessVerdict.unknown)


def test_most_models_at_chance_are_not_recommended_at_the_default_sizes():
    rng, fit, verdicts = np.random.default_rng(0), fitted_readiness(), []
    for seed in range(60):
        rewards, gold = rng.normal(size=(2, 64, 512))
        asked = probe_questions(rewards, 512, 256, seed=seed)
        wins = expit(2 * (gold[asked.prompt, asked.pick] - gold[asked.prompt, asked.other]))
        rate = clustered_share(wins, asked.prompt, confidence=0.975)  # as the last look of the default rule has it
        record = ProbeRecord(512, rate, 256, 256, 0, 256, "all 256 questions are asked")
        features = evidence(probe_64=None).features | {"probe_512": rate}
        verdicts.append(conclude(Evidence(Algorithm.rloo_kl, features, (), (record,)), fit).verdict)
    assert set(verdicts) <= {ReadinessVerdict.not_recommended, ReadinessVerdict.unknown}
    assert verdicts.count(ReadinessVerdict.unknown) <= 3


def test_rewards_that_rank_no_response_decide_before_anything_is_asked():
    features = {name: value for name, value in evidence(tied_groups=1.0).features.items() if name != "probe_64"}
    found = conclude(Evidence(Algorithm.rloo_kl, features, (), ()), FIT)
    assert found.verdict is ReadinessVerdict.not_recommended
    assert found.basis == "the rewards of all responses to a prompt are equal"
    assert not any("answer" in step for step in found.recommendations)


@pytest.mark.parametrize(
    ("algorithm", "features", "verdict"),
    [
        (Algorithm.rloo_kl, {"reward_spread": 0.03}, ReadinessVerdict.acceptable),
        (Algorithm.grpo, {"reward_spread": 0.03}, ReadinessVerdict.ready),
        (Algorithm.bon, {"reward_spread": 0.03}, ReadinessVerdict.ready),
        (Algorithm.grpo, {"tied_groups": 0.6}, ReadinessVerdict.acceptable),
        (Algorithm.rloo_kl, {"tied_groups": 0.6}, ReadinessVerdict.ready),
    ],
)
def test_spread_counts_for_the_algorithm_that_does_not_rescale_it(algorithm, features, verdict):
    found = conclude(replace(evidence(probe_64=0.95, **features), algorithm=algorithm), FIT)
    assert found.verdict is verdict
    assert (verdict is ReadinessVerdict.ready) == (found.recommendations[0].startswith("start with a penalty"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": Algorithm.ppo_kl}, "validated for bon, rloo_kl, grpo, not for ppo_kl"),
        ({"features": evidence(probe_64=0.9, accuracy_relative=None).features}, "needs accuracy_relative"),
    ],
)
def test_without_a_score_nothing_is_known_and_it_says_why(change, words):
    found = conclude(replace(evidence(probe_64=0.9), **change), FIT)
    assert (found.verdict, found.score) == (ReadinessVerdict.unknown, None)
    assert words in found.cautions[0]


def test_without_an_oracle_the_next_step_is_to_get_one():
    features = {name: value for name, value in evidence().features.items() if name != "probe_64"}
    found = conclude(Evidence(Algorithm.rloo_kl, features, (), ()), FIT)
    assert found.verdict is ReadinessVerdict.unknown
    assert "no oracle compared responses" in found.basis
    assert "--ask FILE" in found.recommendations[0]


def test_extrapolation_and_sensitivities_are_said():
    found = conclude(evidence(probe_64=0.9, accuracy_relative=1.2, length_correlation=0.7), FIT)
    assert "extrapolates: accuracy_relative lies outside" in found.cautions[0]
    far = replace(evidence(probe_64=0.9), unscored={"policy_out_of_distribution": Estimate(0.5, 0.1, 9, 0.4, 0.6)})
    assert "50% of the policy's responses are unlike the labeled pairs" in conclude(far, FIT).cautions[0]
    assert any("reward follows length" in sentence for sentence in found.recommendations)
