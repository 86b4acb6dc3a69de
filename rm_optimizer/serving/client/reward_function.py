"""Reward functions for TRL's trainers (`reward_funcs`), from a model in memory or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.rows.messages import TEMPLATE_COLUMNS, Prompt, read_response, turns_of
from rm_optimizer.core.rows.natural import listed
from rm_optimizer.core.rows.prompts import read_prompt, with_context


def trl_reward(scorer: Scorer, name: str = "reward", tools: Iterable[Any] | None = None) -> Callable[..., list[float]]:
    """Reward function for TRL: raw rewards of completions given as texts or messages. Pickles if the scorer does.

    Args:
        scorer: `RewardClient`, or a model in memory.
        name: name of the function in TRL's log.
        tools: functions or their descriptions, as the trainer's `tools`, which TRL does not pass on; a row's column
            `tools` takes their place. Empty for a model that was trained without them.

    Raises:
        CheckpointError: by the function, if a reward is NaN or infinite.
        ValueError: by the function, if a completion is not text and does not end with the assistant's message, or
            calls tools that are not given.

    Example:
        >>> trainer = GRPOTrainer(model, reward_funcs=trl_reward(RewardClient(url)), …)  # doctest: +SKIP
    """
    return _RewardFunction(scorer, name, tool_descriptions(tools))


class _RewardFunction:
    """Reward function by class: unlike a nested function it can be pickled, and TRL reads its `__name__`.

    TRL (1.16) takes the name of a `functools.partial` from the function inside.
    """

    def __init__(self, scorer: Scorer, name: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._scorer, self._tools = scorer, tools
        self.__name__ = name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        rewards: list[float] = self._scorer.score(*conversations(prompts, completions, columns, self._tools)).tolist()
        require_finite(rewards, lambda index: f"completion {index + 1}")
        return rewards


def tool_descriptions(tools: Iterable[Any] | None) -> list[Mapping[str, Any]] | None:
    """Descriptions of tools of which some are functions; None for None.

    Raises:
        ValueError: if a function has no docstring, or it does not describe an argument.
    """
    if tools is None:
        return None
    from transformers.utils import get_json_schema

    return [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools]


def conversations(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses of texts or messages as TRL passes them.

    Args:
        prompts: text or messages, one for each completion.
        completions: text or messages that end with the assistant's; those before may be of tools.
        columns: further columns; those that a chat template reads, such as `tools`, belong to the prompts.
        tools: tools of all prompts without a column `tools`; None if they are unknown.

    Raises:
        TypeError: if an argument is a text in place of a list.
        ValueError: if a completion is not text and does not end with the assistant's message, or calls unknown tools.
    """
    found: list[tuple[Prompt, str]] = []
    beside = {name: listed(name, columns[name]) for name in TEMPLATE_COLUMNS if columns.get(name) is not None}
    if tools is not None:
        beside.setdefault("tools", [tools] * len(prompts))
    rows = zip(listed("prompts", prompts), listed("completions", completions), strict=True)
    for place, (prompt, completion) in enumerate(rows):
        before = with_context(read_prompt(prompt), {name: values[place] for name, values in beside.items()})
        response = read_response("completion", completion)
        if "tools" not in beside and any("tool_calls" in message.fields for message in turns_of(response)):
            raise ValueError(
                f"completion {place + 1} calls tools that the reward model does not see, since TRL does not pass them; "
                "give the trainer's as trl_reward(…, tools=TOOLS), or tools=[] for a model trained without them"
            )
        found.append((before, response))
    return [prompt for prompt, _ in found], [text for _, text in found]
