"""Probes and reward checks on numbers made by hand: closed forms, and a control that stays at chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.doctor import rewards as doctor_rewards
from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.doctor.label_signal import label_checks


def scored_by_hand(rewards: np.ndarray, features: np.ndarray, pairs: Sequence[PreferencePair]):
    return doctor_rewards.ScoredPairs(tuple(pairs), rewards, features, {"train": len(pairs)})


def test_a_reward_that_is_the_length_warns_and_one_that_is_not_passes():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 200, size=(100, 2)) * 2 + [0, 1]
    pairs = [PreferencePair(f"{i}?", "x" * a, "x" * b) for i, (a, b) in enumerate(lengths.tolist())]
    none = np.zeros((100, 2, 1))
    by_length = doctor_rewards.reward_length(
        scored_by_hand(np.sqrt(lengths - lengths.mean(1)[:, None] + 500), none, pairs)
    )
    assert by_length.status is Status.warn
    assert by_length.measured == pytest.approx(1.0, abs=1e-3)
    unrelated = doctor_rewards.reward_length(scored_by_hand(generator.normal(size=(100, 2)), none, pairs))
    assert unrelated.status is Status.ok
    assert unrelated.details["low"] < 0 < unrelated.details["high"]


def test_ties_warn_and_constant_rewards_fail():
    rewards = np.random.default_rng(0).normal(size=(100, 2))
    assert doctor_rewards.reward_spread(rewards).status is Status.ok
    rewards[:5, 1] = rewards[:5, 0]
    tied = doctor_rewards.reward_spread(rewards)
    assert (tied.status, tied.details["tie_rate"]) == (Status.warn, 0.05)
    constant = doctor_rewards.reward_spread(np.full((10, 2), 7.25))
    assert constant.status is Status.fail
    assert "collapsed" in constant.explanation


def test_the_control_is_at_chance_for_any_features_and_few_pairs_are_skipped():
    pairs = [PreferencePair(f"{i}?", f"yes {i}", f"no {i}") for i in range(60)]
    features = np.random.default_rng(0).normal(size=(60, 2, 200))
    features[:, 0] += 3.0  # every better response is shifted alike
    signal, shuffle = label_checks(scored_by_hand(np.zeros((60, 2)), features, pairs), is_fresh=False, seed=0)
    assert signal.measured > 0.9
    assert shuffle.status is Status.ok
    few = label_checks(scored_by_hand(np.zeros((9, 2)), features[:9], pairs[:9]), is_fresh=False, seed=0)
    assert {check.status for check in few} == {Status.skipped}
