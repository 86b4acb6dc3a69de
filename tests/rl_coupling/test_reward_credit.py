"""Credit combines environment and model as named, reaches an inner assigner, and never invents a score."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling import RewardModelCreditAssigner
from tests.rl_coupling.rollouts import episode


def scored(score: float, name: str = "a", group: str = "g"):
    return episode(name, ("x", "y"), ("z", "w"), rewards=(1.0, 3.0), rm_score=score, group=group)


@pytest.mark.parametrize(
    ("mode", "score", "weight", "total"),
    [
        ("replace", -2.0, 0.5, -2.0),
        ("add", -2.0, 0.5, 2.0),
        ("multiply", -2.0, 0.5, -8.0),
        ("weighted", -2.0, 0.25, 2.5),
        ("bonus", -2.0, 0.25, 4.0),
        ("bonus", 2.0, 0.25, 4.5),
    ],
)
def test_every_step_gets_the_combined_reward(mode, score, weight, total):
    found = RewardModelCreditAssigner(mode, weight=weight).compute([scored(score)])
    assert found == {("a", 0): total, ("a", 1): total}


class GroupNormalized:
    """Reward less the mean of its group, over the group's deviation; reads the framework's own metadata."""

    def compute(self, rollouts):
        groups: dict[str, list] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.meta["group"], []).append(rollout)
        weights = {}
        for group in groups.values():
            rewards = np.array([rollout.total_reward for rollout in group])
            for rollout, value in zip(group, (rewards - rewards.mean()) / rewards.std(), strict=True):
                weights |= {(rollout.id, step.index): float(value) for step in rollout.steps}
        return weights


class ToGo:
    """Sum of the rewards from a step on."""

    def compute(self, rollouts):
        return {
            (rollout.id, step.index): sum(later.reward for later in rollout.steps[place:])
            for rollout in rollouts
            for place, step in enumerate(rollout.steps)
        }


def test_an_inner_assigner_normalizes_the_model_s_scores():
    rollouts = [
        scored(score, name, group)
        for name, score, group in (("a", 1, "g"), ("b", 3, "g"), ("c", 9, "h"), ("d", 5, "h"))
    ]
    found = RewardModelCreditAssigner(inner=GroupNormalized()).compute(rollouts)
    assert [found[name, 1] for name in "abcd"] == pytest.approx([-1.0, 1.0, 1.0, -1.0])
    assert [rollout.total_reward for rollout in rollouts] == [4.0] * 4


def test_the_change_goes_to_the_last_step_so_that_steps_sum_to_the_total():
    found = RewardModelCreditAssigner("add", ToGo()).compute([scored(10.0)])
    assert found == {("a", 0): 14.0, ("a", 1): 13.0}


def test_a_rollout_without_a_score_is_named_and_nothing_is_taken_for_zero():
    with pytest.raises(ValueError, match="rollout b has no score under 'rm_score'"):
        RewardModelCreditAssigner().compute([scored(1.0), episode("b", ("x", "y"))])
    with pytest.raises(ValueError, match="rollout a has no score under 'helpful'"):
        RewardModelCreditAssigner(score_key="helpful").compute([scored(1.0)])
    for score in (float("nan"), "x"):
        with pytest.raises(ValueError, match=f"rollout a has the score {score} under 'rm_score'; score it again"):
            RewardModelCreditAssigner().compute([scored(score)])
    with pytest.raises(ValueError, match="several rollouts have the id a"):
        RewardModelCreditAssigner().compute([scored(1.0), scored(2.0)])
    assert RewardModelCreditAssigner().compute([scored(0.0)]) == {("a", 0): 0.0, ("a", 1): 0.0}
    assert RewardModelCreditAssigner().compute([]) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "weigthed"}, "unknown mode 'weigthed'; did you mean 'weighted'"),
        ({"mode": "weighted", "weight": 1.5}, r"weight must lie in \[0, 1\] with mode=weighted, got 1.5"),
        ({"mode": "bonus", "weight": float("inf")}, "weight must be finite and not negative with mode=bonus"),
        ({"mode": "bonus", "weight": float("nan")}, "weight must be finite"),
    ],
)
def test_a_wrong_option_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        RewardModelCreditAssigner(**options)
