"""Ensembles, best-of-n and readiness as the tutorial calls them, on small models."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.ensemble import EnsemblePrediction, RewardModelEnsemble
from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler
from rm_optimizer.rl_coupling.rl_readiness import RLReadinessReport, RLReadinessScorer
from rm_optimizer.rl_coupling.world_policy import WorldPolicy
from tests.builders import tiny_reward_model

PROMPT, RESPONSE = "Explain chess.", "Start with the pawns."
WEIGHTS = {"accuracy": 0.35, "calibration": 0.25, "stability": 0.25, "landscape": 0.15}


@pytest.fixture(scope="module")
def models():
    return [tiny_reward_model("llama", seed=seed, max_length=64) for seed in (0, 1, 2)]


def test_an_ensemble_predicts_and_flags_one_text(models):
    ensemble = RewardModelEnsemble(models, uncertainty_threshold=0.5)
    assert ensemble.models == models
    assert ensemble.threshold == 0.5
    found = ensemble.predict(PROMPT, RESPONSE)
    assert isinstance(found, EnsemblePrediction)
    own = [float(model.score(PROMPT, RESPONSE)) for model in ensemble.models]
    assert found.individual_rewards == pytest.approx(own, abs=1e-6)
    assert found.mean_reward == pytest.approx(np.mean(own), abs=1e-6)
    assert found.std_reward == pytest.approx(np.std(own, ddof=1), abs=1e-6)
    flag = ensemble.detect_ood(PROMPT, RESPONSE)
    assert flag is found.is_high_uncertainty is bool(found.std_reward > 0.5)


def test_the_callers_threshold_decides_and_lists_give_all_scores(models):
    spread = RewardModelEnsemble(models, 0.0).predict(PROMPT, RESPONSE).std_reward
    assert RewardModelEnsemble(models, spread * 0.99).detect_ood(PROMPT, RESPONSE) is True
    low = RewardModelEnsemble(models, spread * 1.01)
    assert low.detect_ood(PROMPT, RESPONSE) is False
    low.fit_reference([PROMPT] * 40, [f"{RESPONSE} {number}" for number in range(40)])
    assert low.threshold == spread * 1.01
    found = low.detect_ood([PROMPT, PROMPT], [RESPONSE, "No."])
    assert len(found.scores) == len(found.is_ood) == 2
    assert found.false_positive_rate is None


def test_members_that_are_saved_stay_as_they_were_given(models, tmp_path):
    for number in (0, 1):
        models[number].save_pretrained(tmp_path / str(number))
    ensemble = RewardModelEnsemble([tmp_path / "0", str(tmp_path / "1")], uncertainty_threshold=0.5)
    assert ensemble.models == [tmp_path / "0", str(tmp_path / "1")]
    given = RewardModelEnsemble(models[:2], 0.5).predict(PROMPT, RESPONSE)
    assert ensemble.predict(PROMPT, RESPONSE).individual_rewards == pytest.approx(given.individual_rewards, abs=1e-5)


def test_best_of_n_gives_text_and_reward_of_each_prompt(models):
    world = PreferenceWorld(0)
    sampler = BestOfNSampler(model=WorldPolicy(world), reward_model=models[0], n_samples=4, use_vllm=False)
    prompts = world.prompts()[:3]
    found = sampler.sample(prompts)
    for ranked, (text, reward), prompt in zip(found, found, prompts, strict=True):
        assert text == ranked.best
        assert reward == ranked.rewards[0] == max(ranked.rewards)
        assert float(models[0].score(prompt, text)) == pytest.approx(reward, abs=1e-5)
        assert repr(ranked).count("\n") == 0
        assert len(repr(ranked)) < 140
    ((text, reward),) = sampler.sample(prompts[0])
    assert (text, reward) == tuple(found[0])


def test_readiness_has_a_score_and_its_four_parts():
    scorer = RLReadinessScorer()
    assert scorer.weights == WEIGHTS
    report = scorer.compute_score(accuracy=0.87, ece=0.05, reward_variance=1.2, top_eigenvalue=150)
    parts = (report.accuracy_score, report.calibration_score, report.stability_score, report.landscape_score)
    assert parts == pytest.approx((0.87, 0.75, 0.72, 350 / 450))
    assert report.overall_score == pytest.approx(np.dot([*WEIGHTS.values()], parts))
    assert round(report.overall_score, 3) == 0.789
    again = RLReadinessReport.from_json(report.to_json())
    assert again.calibration_score == report.calibration_score
    assert repr(report).count("\n") < 12
    with pytest.raises(ConfigError, match="weights must name accuracy, calibration, stability, landscape, got ece"):
        RLReadinessScorer({"ece": 1.0})


def test_readiness_advises_as_the_tutorial_does():
    report = RLReadinessScorer().compute_score(accuracy=0.6, ece=0.2, reward_variance=2.5, top_eigenvalue=300)
    assert len(report.recommendations) == 4
    assert report.overall_score < 0.6
    assert str(report.verdict) == "not recommended"
