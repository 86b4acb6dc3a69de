"""Features of readiness against closed forms, simulations and invariances."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import clustered_share, wilson_interval
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling.readiness.features import (
    epistemic_std,
    length_sensitivity,
    relative_to_ceiling,
    reward_spread,
    tempered_scores,
    tied_groups,
)
from rm_optimizer.rl_coupling.readiness.probe import probe_questions


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_probe_of_a_perfect_model_wins_as_often_as_the_best_of_n_beats_another(rng):
    gold = rng.normal(size=(40, 12))
    asked = probe_questions(gold, 4, 4000, seed=0)
    wins = (gold[asked.prompt, asked.pick] > gold[asked.prompt, asked.other]).astype(float)
    assert (asked.pick != asked.other).all()
    ranks = np.arange(12)
    best = np.diff(np.concatenate([[0.0], [np.prod((k - np.arange(4)) / (12 - np.arange(4))) for k in range(1, 13)]]))
    exact = float((best * ranks / 11).sum())
    found = clustered_share(wins, asked.prompt)
    assert abs(found.value - exact) < 4 * found.standard_error


def test_probe_of_a_constant_model_is_chance(rng):
    gold = rng.normal(size=(50, 8))
    asked = probe_questions(np.zeros((50, 8)), 8, 5000, seed=1)
    wins = (gold[asked.prompt, asked.pick] > gold[asked.prompt, asked.other]).astype(float)
    assert abs(wins.mean() - 0.5) < 0.03


def test_every_beginning_of_the_probe_is_balanced_over_prompts(rng):
    asked = probe_questions(rng.normal(size=(10, 5)), 3, 25, seed=0)
    for length in (10, 20):
        assert set(np.bincount(asked.prompt[:length], minlength=10)) == {length // 10}
    again = probe_questions(np.zeros((10, 5)), 3, 25, seed=0)
    assert (again.prompt == asked.prompt).all()


def test_independent_rows_give_wilsons_interval_and_clusters_widen_it(rng):
    shares = (rng.random(400) < 0.7).astype(float)
    alone = clustered_share(shares)
    low, high = wilson_interval(shares.mean(), 400)
    assert (alone.low, alone.high) == pytest.approx((low, high))
    repeated = clustered_share(np.repeat(shares, 5), np.repeat(np.arange(400), 5))
    assert (repeated.low, repeated.high) == pytest.approx((low, high), abs=1e-3)
    certain = clustered_share(np.ones(30), np.repeat(np.arange(10), 3))
    assert (certain.low, certain.high) == pytest.approx(wilson_interval(1.0, 10))


def test_interval_of_clustered_rows_covers_the_truth(rng):
    covered = 0
    for _ in range(300):
        chance = np.clip(0.7 + 0.2 * rng.normal(size=60), 0, 1)
        rows = (rng.random((60, 4)) < chance[:, None]).astype(float)
        found = clustered_share(rows.ravel(), np.repeat(np.arange(60), 4))
        covered += found.low <= 0.6917 <= found.high  # mean of the clipped normal
    assert covered / 300 >= 0.91


def test_tempered_scores_do_not_depend_on_the_scale_of_rewards(rng):
    truth = rng.normal(size=600)
    margin = np.where(rng.random(600) < 1 / (1 + np.exp(-truth)), truth, -truth)
    prompts = np.arange(600)
    one, ten = (tempered_scores(scale * margin, prompts, num_bootstrap=0) for scale in (1.0, 10.0))
    assert ten.nll.value == pytest.approx(one.nll.value)
    assert ten.brier.value == pytest.approx(one.brier.value)
    assert ten.temperature.temperature == pytest.approx(10 * one.temperature.temperature)
    assert one.nll.value < np.log(2)
    assert tempered_scores(-margin, prompts, num_bootstrap=0).nll.value == pytest.approx(np.log(2))


def test_reward_spread_is_the_share_within_prompts_and_ignores_scale(rng):
    rewards = 2 * rng.normal(size=(2000, 1)) + rng.normal(size=(2000, 8))
    found = reward_spread(rewards, num_bootstrap=200)
    assert found.value == pytest.approx(0.2, abs=0.02)
    assert found.low < 0.2 < found.high
    assert reward_spread(5 + 3 * rewards, num_bootstrap=0).value == pytest.approx(found.value)
    assert reward_spread(rng.normal(size=(5, 4)), num_bootstrap=0).value <= 1


def test_disagreement_ignores_offsets_and_scales_of_members(rng):
    rewards = rng.normal(size=(30, 6))
    offsets = rng.normal(size=(30, 1))
    assert epistemic_std(np.stack([rewards, 3 * rewards + offsets])).value == pytest.approx(0, abs=1e-9)
    noisy = np.stack([rewards + 0.5 * rng.normal(size=rewards.shape) for _ in range(4)])
    noisier = np.stack([rewards + 1.5 * rng.normal(size=rewards.shape) for _ in range(4)])
    assert 0 < epistemic_std(noisy).value < epistemic_std(noisier).value


def test_length_sensitivity_controls_for_the_prompt(rng):
    gold = rng.normal(size=(300, 6))
    lengths = gold + rng.normal(size=gold.shape) + 10 * rng.normal(size=(300, 1))
    rewards = 2 * gold - 5 * rng.normal(size=(300, 1)) + 0.3 * rng.normal(size=gold.shape)
    plain = length_sensitivity(rewards, lengths, num_bootstrap=100)
    assert plain.value > 0.5
    assert length_sensitivity(lengths, lengths, num_bootstrap=0).value == pytest.approx(1)
    assert np.isnan(length_sensitivity(rewards, np.ones_like(rewards), num_bootstrap=0).value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: probe_questions(np.zeros((2, 1)), 1, 5, seed=0), "draw at least 2"),
        (lambda: probe_questions(np.zeros((2, 4)), 5, 5, seed=0), r"must lie in 1 … 4, .* got 5"),
        (lambda: probe_questions(np.zeros((2, 4)), 2, 0, seed=0), "must be positive"),
        (lambda: tied_groups(np.zeros((3, 4)), 5), "group_size must lie in 2"),
        (lambda: relative_to_ceiling(Estimate(0.7, 0.02, 9), 0.5), "ceiling of the accuracy must lie"),
        (lambda: reward_spread(np.full((3, 3), np.nan)), "rewards must be finite"),
        (lambda: reward_spread(np.zeros((1, 3))), "at least 2 prompts"),
        (lambda: epistemic_std(np.zeros((1, 2, 2))), "at least 2 members"),
        (lambda: epistemic_std(np.zeros((2, 2, 2))), "leave it out"),
    ],
)
def test_unusable_arrays_are_refused_in_a_sentence(call, message):
    with pytest.raises((ConfigError, DataError), match=message):
        call()
