"""Reward functions for TRL's trainers (`reward_funcs`), from a model in memory or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rm_optimizer.core.pairs.pair import Scorer, require_finite
from rm_optimizer.core.rows.messages import TEMPLATE_COLUMNS, Prompt, read_response
from rm_optimizer.core.rows.natural import listed
from rm_optimizer.core.rows.prompts import read_prompt, with_context


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

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        rewards: list[float] = self._scorer.score(*conversations(prompts, completions, columns)).tolist()
        require_finite(rewards, lambda index: f"completion {index + 1}")
        return rewards


def conversations(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any] = MappingProxyType({})
) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses of texts or messages as TRL passes them.

    Args:
        prompts: text or messages, one for each completion.
        completions: text or messages that end with the assistant's; those before may be of tools.
        columns: further columns; those that a chat template reads, such as `tools`, belong to the prompts.

    Raises:
        TypeError: if an argument is a text in place of a list.
        ValueError: if a completion is not text and does not end with the assistant's message.
    """
    found: list[tuple[Prompt, str]] = []
    beside = {name: listed(name, columns[name]) for name in TEMPLATE_COLUMNS if columns.get(name) is not None}
    rows = zip(listed("prompts", prompts), listed("completions", completions), strict=True)
    for place, (prompt, completion) in enumerate(rows):
        before = with_context(read_prompt(prompt), {name: values[place] for name, values in beside.items()})
        found.append((before, read_response("completion", completion)))
    return [prompt for prompt, _ in found], [text for _, text in found]
