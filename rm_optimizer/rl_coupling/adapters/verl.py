"""Reward functions for verl (`custom_reward_function.path`), called for one response or for a batch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from rm_optimizer.core.pairs.pair import Prompt, Scorer
from rm_optimizer.core.rows.messages import read_prompt

if TYPE_CHECKING:
    from rm_optimizer.serving.client.client import AsyncRewardClient

PROMPT_KEY = "prompt"
"""Key of `extra_info` that holds the prompt, which verl passes to reward functions in no other way."""


def verl_compute_score(scorer: Scorer, *, prompt_key: str = PROMPT_KEY) -> Callable[..., float]:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)` of verl's naive reward managers.

    The manager of verl's reward loop calls it from several threads. With a model in this process they take turns.

    Args:
        scorer: the reward model, or a client of its server.
        prompt_key: key of `extra_info` with the prompt, text or messages.

    Raises:
        ValueError: by the function, if `extra_info` has no prompt.
    """
    score = _locked(scorer)

    def compute_score(
        data_source: Any,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> float:
        return float(score(_prompts([extra_info], prompt_key), [solution_str])[0])

    return compute_score


def verl_compute_score_async(
    client: AsyncRewardClient, *, prompt_key: str = PROMPT_KEY
) -> Callable[..., Coroutine[Any, Any, float]]:
    """`verl_compute_score` as a coroutine function, which verl's reward loop awaits without a thread for each call.

    The client opens its session on that loop.

    Args:
        client: client of a reward server.
        prompt_key: key of `extra_info` with the prompt, text or messages.

    Raises:
        ValueError: by the function, if `extra_info` has no prompt.
    """

    async def compute_score(
        data_source: Any,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> float:
        return float((await client.score(_prompts([extra_info], prompt_key), [solution_str]))[0])

    return compute_score


def verl_compute_scores(scorer: Scorer, *, prompt_key: str = PROMPT_KEY) -> Callable[..., list[float]]:
    """`compute_score(data_sources, solution_strs, ground_truths, extra_infos)` of verl's batch reward manager.

    Newer versions of verl have no batch manager. In some older ones it replaces an exception by zeros, which hides a
    failed server; check the server's log.

    Args:
        scorer: the reward model, or a client of its server.
        prompt_key: key of each `extra_info` with the prompt, text or messages.

    Raises:
        ValueError: by the function, if an `extra_info` has no prompt.
    """
    score = _locked(scorer)

    def compute_score(
        data_sources: Sequence[Any],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any] | None],
        **others: Any,
    ) -> list[float]:
        return [float(reward) for reward in score(_prompts(extra_infos, prompt_key), list(solution_strs)).tolist()]

    return compute_score


def _locked(scorer: Scorer) -> Callable[[Sequence[Prompt], Sequence[str]], Tensor]:
    """The scorer's function; a model in this process is limited to one thread at a time."""
    if not isinstance(scorer, nn.Module):
        return scorer.score
    lock = Lock()

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        with lock:
            return scorer.score(prompts, responses)

    return score


def _prompts(infos: Sequence[Mapping[str, Any] | None], prompt_key: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for index, info in enumerate(infos):
        if info is None or info.get(prompt_key) is None:
            raise ValueError(
                f"extra_info of response {index + 1} has no '{prompt_key}', and verl passes the prompt nowhere else; "
                "add it to the data set, or name another key with prompt_key="
            )
        found = info[prompt_key]
        prompts.append(read_prompt(found.tolist() if isinstance(found, np.ndarray) else found))
    return prompts
