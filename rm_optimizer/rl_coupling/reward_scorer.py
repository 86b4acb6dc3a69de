"""Scores of rollouts by a reward model in this process or on a server, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from rm_optimizer.core.pairs.pair import Message, Prompt, Scorer, require_finite
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.rollouts import Rollout, metadata_of
from rm_optimizer.serving.client.client import AsyncRewardClient

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
        if batch_size < 1:
            raise ConfigError(f"batch_size must be positive, got {batch_size}")
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be positive, got {max_concurrency}")
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
            async with slots:
                rewards = await self._rewards([prompt for prompt, _ in part], [text for _, text in part])
            return [float(reward) for reward in rewards.tolist()]

        scores = [score for part in await asyncio.gather(*map(scored, parts)) for score in part]
        require_finite(scores, lambda index: f"rollout {rollouts[index].id}")
        for store, score in zip(stores, scores, strict=True):
            store[self.score_key] = score
        return scores

    async def _rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        if isinstance(self.reward_model, AsyncRewardClient):
            return await self.reward_model.score(prompts, responses)
        return await asyncio.to_thread(self.reward_model.score, prompts, responses)


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
