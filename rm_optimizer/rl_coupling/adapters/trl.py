"""Asynchronous reward function for TRL (`reward_funcs`); the blocking one is `rm_optimizer.serving.trl_reward`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rm_optimizer.serving.client.client import AsyncRewardClient
from rm_optimizer.serving.client.reward_function import conversations


def trl_reward_async(client: AsyncRewardClient, name: str = "reward") -> Callable[..., Awaitable[list[float]]]:
    """Coroutine function for raw rewards of texts or messages, which TRL awaits together with other rewards.

    TRL has one event loop for its reward functions. The client opens its session on this loop.

    Args:
        client: client of a reward server.
        name: name of the function in TRL's log.

    Raises:
        ValueError: by the function, if a completion is not text and does not end with the assistant's message.
    """

    async def rewards(prompts: Sequence[Any], completions: Sequence[Any], **ignored: Any) -> list[float]:
        found = await client.score(*conversations(prompts, completions))
        return [float(reward) for reward in found.tolist()]

    rewards.__name__ = name
    return rewards
