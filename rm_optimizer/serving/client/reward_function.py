"""Reward functions for TRL's trainers (`reward_funcs`), from a model in memory or a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rm_optimizer.core.pairs.pair import Scorer, require_finite
from rm_optimizer.core.rows.messages import Prompt, as_messages, read_messages, read_prompt
from rm_optimizer.core.rows.natural import listed


def trl_reward(scorer: Scorer, name: str = "reward") -> Callable[..., list[float]]:
    """Reward function for TRL: raw rewards of completions given as texts or messages. Pickles if the scorer does.

    Args:
        scorer: `RewardClient`, or a model in memory.
        name: name of the function in TRL's log.

    Raises:
        CheckpointError: by the function, if a reward is NaN or infinite.
        ValueError: by the function, if a completion is not text and does not end with the assistant's message.

    Example:
        >>> trainer = GRPOTrainer(model, reward_funcs=trl_reward(RewardClient(url)), …)  # doctest: +SKIP
    """
    return _RewardFunction(scorer, name)


class _RewardFunction:
    """Reward function by class: unlike a nested function it can be pickled, and TRL reads its `__name__`.

    TRL (1.16) takes the name of a `functools.partial` from the function inside.
    """

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer = scorer
        self.__name__ = name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **ignored: Any) -> list[float]:
        rewards: list[float] = self._scorer.score(*conversations(prompts, completions)).tolist()
        require_finite(rewards, lambda index: f"completion {index + 1}")
        return rewards


def conversations(prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses of texts or messages as TRL passes them.

    Raises:
        TypeError: if an argument is a text in place of a list.
        ValueError: if a completion is not text and does not end with the assistant's message.
    """
    found: list[tuple[Prompt, str]] = []
    for prompt, completion in zip(listed("prompts", prompts), listed("completions", completions), strict=True):
        before = read_prompt(prompt)
        if isinstance(completion, str):
            found.append((before, completion))
            continue
        *between, last = read_messages("completion", completion)  # all messages but the last belong to the prompt
        if last.role != "assistant":
            raise ValueError(f"completion must end with a message of the assistant, got one of {last.role!r}")
        found.append((before if not between else (*as_messages(before), *between), last.content))
    return [prompt for prompt, _ in found], [text for _, text in found]
