"""A measurement of tiny models on the synthetic world, and what it needs and refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler
from rm_optimizer.rl_coupling.readiness import measurement
from rm_optimizer.rl_coupling.readiness.fitted import FitProvenance, FittedFeature, FittedOutcome, FittedReadiness
from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions, measure_readiness
from rm_optimizer.rl_coupling.readiness.probe import ResponsePool, ScorerOracle, StoppingRule
from rm_optimizer.rl_coupling.readiness.report import ReadinessVerdict, RLReadinessReport
from rm_optimizer.rl_coupling.world_policy import WorldGold, WorldPolicy
from tests.builders import tiny_reward_model

WORLD = PreferenceWorld(0, gold=Gold())
PAIRS = PreferenceDataset(WORLD.pairs(0, 110).val)
GOLD = ScorerOracle(WorldGold(WORLD), is_exact=True)
OPTIONS = ReadinessOptions(
    num_prompts=6, num_samples=8, rule=StoppingRule(24, 8), on_policy_pairs=24, num_bootstrap=50, max_pairs=110
)


@pytest.fixture(scope="module")
def model():
    return tiny_reward_model("llama", max_length=256)


@pytest.fixture(scope="module")
def pool(model):
    sampler = BestOfNSampler(WorldPolicy(WORLD), model, OPTIONS.num_samples)
    return ResponsePool.of(sampler.sample(WORLD.prompts()[: OPTIONS.num_prompts]))


@pytest.fixture(scope="module")
def report(model, pool):
    ensemble = RewardModelEnsemble([model, tiny_reward_model("llama", seed=1, max_length=256)])
    return measure_readiness(model, PAIRS, pool, GOLD, options=OPTIONS, ensemble=ensemble, top_eigenvalue=3.0)


def test_a_random_model_is_not_ready_and_the_vector_is_whole(report):
    assert report.verdict in (ReadinessVerdict.not_recommended, ReadinessVerdict.unknown)
    wanted = {"accuracy", "accuracy_relative", "worst_slice_accuracy", "nll", "brier", "style_flips", "reward_spread"}
    assert wanted | {"tied_groups", "length_correlation", "probe_8", "on_policy_accuracy"} <= report.features.keys()
    assert {"epistemic_std", "top_eigenvalue"} <= report.unscored.keys()
    assert all(0 <= report.features[name].value <= 1 for name in ("accuracy", "probe_8", "reward_spread"))
    (probe,) = report.probes
    assert probe.num_questions <= 24
    assert report.sample.num_labels >= probe.num_labels
    assert (report.sample.num_pairs, report.sample.num_prompts, report.sample.num_responses) == (110, 6, 8)


def test_a_report_is_read_as_it_was_written(report):
    assert RLReadinessReport.from_json(report.to_json()).to_json() == report.to_json()


@pytest.mark.slow
def test_without_an_oracle_all_but_the_probe_is_the_same_and_the_model_stays_as_it_was(model, report):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    alone = measure_readiness(model, PAIRS, WorldPolicy(WORLD), None, options=OPTIONS, prompts=WORLD.prompts())
    assert alone.probes == ()
    assert alone.sample.responses == report.sample.responses
    assert report.features.keys() - alone.features.keys() == {"probe_8", "on_policy_accuracy"}
    for name in alone.features.keys() - {"accuracy_relative"}:
        assert alone.features[name] == report.features[name]
    assert any("--ceiling" in caution for caution in alone.cautions)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_without_a_policy_only_the_pairs_are_measured(model):
    bare = measure_readiness(model, PAIRS, None, GOLD, options=replace(OPTIONS, ceiling=0.9))
    assert "reward_spread" not in bare.features
    assert bare.features["accuracy_relative"].value == pytest.approx((bare.features["accuracy"].value - 0.5) / 0.4)
    assert bare.sample.num_prompts == 0
    assert bare.verdict in (ReadinessVerdict.unknown, ReadinessVerdict.not_recommended)


def test_a_constant_model_fails_its_gate_before_anything_is_asked(pool):
    model = tiny_reward_model("llama", max_length=256)
    torch.nn.init.zeros_(model.reward_head.weight)
    report = measure_readiness(model, PAIRS, pool, GOLD, options=OPTIONS)
    assert report.verdict is ReadinessVerdict.not_recommended
    assert "reward_spread" in {check.name for check in report.gates if check.status is Status.fail}
    assert report.sample.num_labels == 0
    assert report.features == {}


def test_unknown_algorithms_get_a_suggestion(model, pool):
    with pytest.raises(ConfigError, match="unknown algorithm 'gpro'; did you mean 'grpo'"):
        measure_readiness(model, PAIRS, pool, GOLD, algorithm="gpro", options=OPTIONS)


def test_as_many_responses_are_drawn_as_the_fitted_probes_pick_from(monkeypatch):
    def of(name: str) -> FittedReadiness:
        term = FittedFeature(name, 0.8, 0.1, 0.5, 0.5, 1.0)
        outcome = FittedOutcome("gold", "sd", (term,), 1.0, 0.3, (0.5, 1.0, 1.5), Estimate(0.7, 0.05, 6))
        return FittedReadiness("test", {"rloo_kl": outcome}, FitProvenance("", (0,), (3,), 8, 8, "", "", {}))

    for name, most in (("probe_512", 512), ("probe_16", 64), ("accuracy", 64)):
        monkeypatch.setattr(measurement, "fitted_readiness", lambda name=name: of(name))
        assert measurement.usual_samples("rloo_kl") == most
        assert measurement.usual_samples("ppo_kl") == 64
