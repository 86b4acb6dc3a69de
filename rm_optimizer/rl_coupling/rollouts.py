"""Scores of rollouts by a reward model, and the credit of their steps; classes of RL frameworks fit without changes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias

from torch import nn

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.errors import require_known
from rm_optimizer.schema.checks import require
from rm_optimizer.serving.client.client import AsyncRewardClient

StepKey: TypeAlias = tuple[str, int]
"""Id of a rollout and index of one of its steps."""


class Step(Protocol):
    """One turn: an observation and the policy's action."""

    @property
    def index(self) -> int:
        """Position in the rollout, from 0."""

    @property
    def prev_obs(self) -> str:
        """Text that the policy read."""

    @property
    def action(self) -> str:
        """Text that the policy wrote."""

    @property
    def reward(self) -> float:
        """Reward of the environment."""


class Rollout(Protocol):
    """An episode of a policy. Its attribute `metadata` or `meta` is a mutable mapping."""

    @property
    def id(self) -> str:
        """Unique name of the rollout."""

    @property
    def steps(self) -> Sequence[Step]:
        """The turns, first to last."""

    @property
    def total_reward(self) -> float:
        """Sum of the environment's rewards."""


class CreditAssigner(Protocol):
    """Object that gives each step of rollouts a weight."""

    def compute(self, rollouts: Sequence[Any]) -> Mapping[StepKey, float]:
        """Weights of the steps of all rollouts."""
        ...


def metadata_of(rollout: Rollout) -> MutableMapping[str, Any]:
    """The rollout's metadata.

    Raises:
        ValueError: if it has none.
    """
    found = getattr(rollout, "metadata", None)
    found = getattr(rollout, "meta", None) if found is None else found
    if not isinstance(found, MutableMapping):
        raise ValueError(f"rollout {rollout.id} has no metadata to hold a score; give it a dict as metadata or meta")
    return found


SCORE_KEY = "rm_score"
"""Key of a rollout's metadata that holds its score."""
RenderRollout = Callable[[Rollout], tuple[Prompt, str]]
"""Function from a rollout to the prompt and the response that the reward model reads."""


class RewardModelScorer:
    """Scorer of rollouts that stores each score in the rollout's metadata.

    A rollout is rendered by `render_fn` if it is given, else as messages if the model has a chat template, else as the
    plain concatenation of its steps. Observations are the user's messages, and actions are the assistant's. The last
    action is the response, and everything before it is the prompt.

    Args:
        reward_model: scorer of the responses; a model in this process scores one batch at a time.
        render_fn: rendering of a rollout as prompt and response; None renders as described above.
        score_key: key of the metadata that holds the score.
        batch_size: rollouts in one call, positive.
        max_concurrency: most calls at a time, positive.

    Raises:
        ConfigError: if an option is out of its range.
    """

    def __init__(
        self,
        reward_model: Scorer | AsyncRewardClient,
        *,
        render_fn: RenderRollout | None = None,
        score_key: str = SCORE_KEY,
        batch_size: int = 64,
        max_concurrency: int = 8,
    ) -> None:
        require(batch_size >= 1, "batch_size", "be positive", batch_size)
        require(max_concurrency >= 1, "max_concurrency", "be positive", max_concurrency)
        self.reward_model = reward_model
        self.score_key = score_key
        self.batch_size = batch_size
        self.max_concurrency = 1 if isinstance(reward_model, nn.Module) else max_concurrency
        renderer = getattr(reward_model, "renderer", None)  # without one here, the server renders messages
        is_plain = renderer is not None and renderer.kind == "plain"
        self._render = render_fn or (as_plain_text if is_plain else as_conversation)

    async def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Scores of the rollouts in the given order, also stored in their metadata after the last call.

        Args:
            rollouts: rollouts with at least one step; may be empty.

        Raises:
            ValueError: if a rollout has no step or no metadata.
            CheckpointError: if a score is not finite.
            RewardServerUnavailable: if the server does not answer in time.
        """
        stores = [metadata_of(rollout) for rollout in rollouts]
        texts = [self._render(rollout) for rollout in rollouts]
        parts = [texts[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]
        slots = asyncio.Semaphore(self.max_concurrency)

        async def scored(part: Sequence[tuple[Prompt, str]]) -> list[float]:
            prompts, responses = [prompt for prompt, _ in part], [text for _, text in part]
            async with slots:
                if isinstance(self.reward_model, AsyncRewardClient):
                    rewards = await self.reward_model.score(prompts, responses)
                else:
                    rewards = await asyncio.to_thread(self.reward_model.score, prompts, responses)
            return [float(reward) for reward in rewards.tolist()]

        scores = [score for part in await asyncio.gather(*map(scored, parts)) for score in part]
        require_finite(scores, lambda index: f"rollout {rollouts[index].id}")
        for store, score in zip(stores, scores, strict=True):
            store[self.score_key] = score
        return scores


def as_conversation(rollout: Rollout) -> tuple[Prompt, str]:
    """The rollout as messages and the last action.

    Raises:
        ValueError: if it has no step.
    """
    _require_steps(rollout)
    *before, last = rollout.steps
    messages: list[Message] = []
    for step in before:
        messages += [Message("user", step.prev_obs), Message("assistant", step.action)]
    return (*messages, Message("user", last.prev_obs)), last.action


def as_plain_text(rollout: Rollout) -> tuple[Prompt, str]:
    """All texts before the last action, one on each line, and the last action.

    Raises:
        ValueError: if it has no step.
    """
    _require_steps(rollout)
    *before, last = rollout.steps
    texts = [text for step in before for text in (step.prev_obs, step.action)]
    return "\n".join([*texts, last.prev_obs]), last.action


def _require_steps(rollout: Rollout) -> None:
    if not rollout.steps:
        raise ValueError(f"rollout {rollout.id} has no step, so there is nothing to score; leave it out")


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
        require_known("mode", mode, known)
        self.mode = CreditMode(mode)
        most, expected = math.inf, "be finite and not negative"
        if self.mode == CreditMode.weighted:
            most, expected = 1, "lie in [0, 1]"
        require(0 <= weight <= most and weight < math.inf, "weight", f"{expected} with mode={mode}", weight)
        self.inner = inner
        self.score_key = score_key
        self.weight = weight

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[StepKey, float]:
        """Weight of each step, keyed by the rollout's id and the step's index.

        Raises:
            ValueError: if a rollout has no score, or one that is not finite, or two rollouts have one id.
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
        reward, weight = float(rollout.total_reward), self.weight
        return {
            CreditMode.add: reward + score,
            CreditMode.multiply: reward * score,
            CreditMode.weighted: (1 - weight) * reward + weight * score,
            CreditMode.bonus: reward + weight * max(score, 0.0),
        }[self.mode]


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
