"""Credit of steps from the reward model's scores of their rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.rl_coupling.reward_scorer import SCORE_KEY
from rm_optimizer.rl_coupling.rollouts import CreditAssigner, Rollout, Step, StepKey, metadata_of


class CreditMode(Enum):
    """Combination of a rollout's environment reward r and score s with a weight w.

    `replace` is s, `add` is `r + s`, `multiply` is `r s`, `weighted` is `(1 - w) r + w s`, and `bonus` is
    `r + w max(s, 0)`, which never lowers the reward.
    """

    replace = "replace"
    add = "add"
    multiply = "multiply"
    weighted = "weighted"
    bonus = "bonus"


class RewardModelCreditAssigner:
    """Assigner of weights to the steps of scored rollouts.

    The combined reward replaces a rollout's total reward. The change is added to the last step, so that the steps'
    rewards sum to the total. The inner assigner then computes the weights from these rollouts.

    Args:
        mode: `replace`, `add`, `multiply`, `weighted` or `bonus`.
        inner: assigner of weights, such as a group-normalized return; with None every step's weight is the combined
            reward.
        score_key: key of the metadata that holds the score.
        weight: w of `weighted`, in [0, 1], and of `bonus`, not negative.

    Raises:
        ConfigError: if the mode is unknown, or the weight is out of its range.
    """

    def __init__(
        self,
        mode: str = CreditMode.replace.value,
        inner: CreditAssigner | None = None,
        *,
        score_key: str = SCORE_KEY,
        weight: float = 0.5,
    ) -> None:
        known = [item.value for item in CreditMode]
        if mode not in known:
            raise ConfigError(did_you_mean("mode", mode, known))
        self.mode = CreditMode(mode)
        is_share = self.mode == CreditMode.weighted
        if not 0 <= weight <= (1 if is_share else math.inf) or math.isinf(weight):
            expected = "lie in [0, 1]" if is_share else "be finite and not negative"
            raise ConfigError(f"weight must {expected} with mode={mode}, got {weight}")
        self.inner = inner
        self.score_key = score_key
        self.weight = weight

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[StepKey, float]:
        """Weight of each step, keyed by the rollout's id and the step's index.

        Raises:
            ValueError: if a rollout has no score, or one that is no finite number, or two rollouts have one id.
        """
        if twice := [name for name, count in Counter(rollout.id for rollout in rollouts).items() if count > 1]:
            raise ValueError(f"weights are keyed by the rollout's id, but several rollouts have the id {twice[0]}")
        scored = [_rewarded(rollout, self._combined(rollout)) for rollout in rollouts]
        if self.inner is not None:
            return self.inner.compute(scored)
        return {(rollout.id, step.index): rollout.total_reward for rollout in scored for step in rollout.steps}

    def _combined(self, rollout: Rollout) -> float:
        store = metadata_of(rollout)
        if store.get(self.score_key) is None:
            raise ValueError(
                f"rollout {rollout.id} has no score under '{self.score_key}' in its metadata; score it with "
                f"RewardModelScorer(score_key='{self.score_key}') first"
            )
        try:
            score = float(store[self.score_key])
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            given = store[self.score_key]
            raise ValueError(f"rollout {rollout.id} has the score {given} under '{self.score_key}'; score it again")
        if self.mode == CreditMode.replace:
            return score
        reward = float(rollout.total_reward)
        if self.mode == CreditMode.add:
            return reward + score
        if self.mode == CreditMode.multiply:
            return reward * score
        if self.mode == CreditMode.weighted:
            return (1 - self.weight) * reward + self.weight * score
        return reward + self.weight * max(score, 0.0)


def _rewarded(rollout: Rollout, total_reward: float) -> Any:
    """The rollout with another total reward, whose change its last step has."""
    steps: list[Step] = list(rollout.steps)
    if steps:
        change = total_reward - sum(float(step.reward) for step in steps)
        steps[-1] = _Changed(steps[-1], reward=float(steps[-1].reward) + change)
    return _Changed(rollout, total_reward=total_reward, steps=steps)


class _Changed:
    """An object with some other attributes; the rest are its own."""

    def __init__(self, own: object, **changes: Any) -> None:
        self._own = own
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
