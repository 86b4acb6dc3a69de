"""Best-of-n selection counts the lists whose highest reward is of a best response."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.evaluation.best_of_n import BestOfN, best_of_n


def pairs_of(name: str, scores: dict[str, float]) -> list[PreferencePair]:
    couples = itertools.combinations(sorted(scores, key=lambda text: -scores[text]), 2)
    metadata = {"group": name, "source": "s"}
    return [PreferencePair(name, a, b, metadata=metadata) for a, b in couples if scores[a] > scores[b]]


def found(rewards: dict[str, dict[str, float]], scores: dict[str, dict[str, float]]) -> BestOfN | None:
    pairs = [pair for name in scores for pair in pairs_of(name, scores[name])]
    sides = [
        np.array([rewards[str(pair.prompt)][getattr(pair, side)] for pair in pairs]) for side in ("chosen", "rejected")
    ]
    return best_of_n(pairs, *sides, num_bootstrap=50, seed=0)


SCORES = {"p": {"aa": 3.0, "bbb": 2.0, "c": 1.0}, "q": {"d": 1.0, "e": 1.0, "ff": 0.0}}


def test_the_highest_reward_must_be_of_one_of_the_best():
    rewards = {"p": {"aa": 0.0, "bbb": 5.0, "c": 1.0}, "q": {"d": 0.0, "e": 2.0, "ff": 1.0}}
    result = found(rewards, SCORES)
    assert result is not None
    assert (result.num_lists, result.mean_responses, result.accuracy.value) == (2, 3.0, 0.5)
    assert result.random == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert result.longest == 0.0


def test_equal_highest_rewards_share_the_list():
    rewards = {"p": {"aa": 1.0, "bbb": 1.0, "c": 0.0}, "q": {"d": 1.0, "e": 1.0, "ff": 0.0}}
    result = found(rewards, SCORES)
    assert result is not None
    assert isinstance(result.accuracy, Estimate)
    assert result.accuracy.value == pytest.approx((0.5 + 1.0) / 2)


def test_pairs_alone_are_no_lists():
    assert best_of_n([PreferencePair("p", "a", "b")], np.ones(1), np.zeros(1), num_bootstrap=0, seed=0) is None
    assert found({"p": {"a": 1.0, "b": 0.0}}, {"p": {"a": 1.0, "b": 0.0}}) is None
