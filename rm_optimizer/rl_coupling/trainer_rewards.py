"""Reward functions for TRL, OpenRLHF and verl, and scales of rewards.

TRL takes functions as `reward_funcs`; the blocking one is `rm_optimizer.serving.trl_reward`. OpenRLHF's `remote_url`
names a Python file with a function `reward_func`. The URL of `rm-opt serve` followed by `/get_reward` does the same
over HTTP. verl calls a `custom_reward_function.path` for one response or for a batch. `docs/rl-coupling.md` shows how.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain, repeat
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.rows.natural import Prompts, Texts
from rm_optimizer.core.rows.prompts import read_prompt
from rm_optimizer.core.storage.model_files import read_record
from rm_optimizer.errors import CheckpointError, ConfigError, require_known
from rm_optimizer.serving.client.client import AsyncRewardClient, RewardClient
from rm_optimizer.serving.client.reward_function import conversations, tool_descriptions
from rm_optimizer.serving.service.inputs import RenderedTexts


def trl_reward_async(
    client: AsyncRewardClient, name: str = "reward", tools: Iterable[Any] | None = None
) -> Callable[..., Awaitable[list[float]]]:
    """Coroutine function for raw rewards of texts or messages, which TRL awaits together with other rewards.

    TRL has one event loop for its reward functions. The client opens its session on this loop.

    Args:
        client: client of a reward server.
        name: name of the function in TRL's log.
        tools: functions or their descriptions, as the trainer's `tools`, which TRL does not pass on; a row's column
            `tools` takes their place. Empty for a model that was trained without them.

    Raises:
        ValueError: by the function, if a completion is not text and does not end with the assistant's message, or
            calls tools that are not given.
    """
    described = tool_descriptions(tools)

    async def rewards(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        found = await client.score(*conversations(prompts, completions, columns, described))
        return [float(reward) for reward in found.tolist()]

    rewards.__name__ = name
    return rewards


RewardFunc = Callable[[Sequence[str], Sequence[str], Sequence[Any]], dict[str, Any]]


def openrlhf_reward_func(model: BradleyTerryRM) -> RewardFunc:
    """`reward_func(queries, prompts, labels)` with the raw rewards of a model in this process.

    Queries are whole conversations decoded by OpenRLHF, and `prompts` shows where each answer begins. They are read as
    by the server: special tokens and padding around a text do not change its reward, and a text that is too long loses
    tokens on the left. Threads that call the function at the same time take turns. OpenRLHF clips rewards to [-10, 10]
    by default (`--reward.clip_range`).

    Args:
        model: the reward model, on its device.

    Raises:
        CheckpointError: by the function, if a reward is not finite.
        ValueError: by the function, if a query holds no text.
        ConversationRefused: by the function, if the chat template changes an answer whose beginning is unknown, or
            refuses it.
    """
    restorer, lock = RenderedTexts(model.renderer), Lock()

    def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
        texts = list(map(restorer.restored, queries, chain(prompts or (), repeat(None))))
        if "" in texts:
            raise ValueError(f"queries[{texts.index('')}] holds no text between its special tokens; leave it out")
        with lock:
            encodings = model.renderer.encode_rendered(texts, model.max_length)
            rewards: Tensor = model.score_encoded(encodings).float()
        require_finite(rewards.tolist(), lambda index: f"queries[{index}]")
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"rm_reward": rewards}}

    return reward_func


Info: TypeAlias = Mapping[str, Any] | None
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
        data_source: Any, solution_str: str, ground_truth: Any, extra_info: Info = None, **others: Any
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
        data_source: Any, solution_str: str, ground_truth: Any, extra_info: Info = None, **others: Any
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
        extra_infos: Sequence[Info],
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


def _prompts(infos: Sequence[Info], prompt_key: str) -> list[Prompt]:
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


class RewardScale(StrEnum):
    """Transformation of raw rewards r.

    `raw` is r, `logit` is `beta r` (a difference of 1 is one unit of log-odds of the preference), and `standard` is
    `(r - mean) / std` with mean and std from the model's validation data. The order of rewards does not change. The
    effect of an RL trainer's KL penalty depends on the scale.
    """

    raw = "raw"
    logit = "logit"
    standard = "standard"


class ScaledScorer(Scorer):
    """Scorer with rewards on a saved scale.

    Args:
        scorer: scorer of raw rewards: the model, or a client of its server.
        scale: `raw`, `logit` or `standard`.
        export: the model's exported folder, which holds the scale's numbers.

    Raises:
        ConfigError: if the scale is unknown.
        CheckpointError: if the folder does not hold the scale's numbers.
    """

    def __init__(self, scorer: Scorer, scale: str, export: str | Path) -> None:
        require_known("scale", scale, RewardScale)
        self.scorer = scorer
        record = read_record(Path(export))
        statistics = record.get("reward_statistics") or {}
        beta = record.get("identity", {}).get("beta", statistics.get("beta"))
        self.shift, self.factor = 0.0, 1.0
        if scale == RewardScale.logit and beta is not None:
            self.factor = float(beta)
        elif scale == RewardScale.standard and statistics.get("std"):
            self.shift, self.factor = float(statistics["mean"]), 1.0 / float(statistics["std"])
        elif scale != RewardScale.raw:
            raise CheckpointError(
                f"{export} records no numbers for scale={scale}; give the best/ folder of a run of rm-opt train, or "
                "scale=raw"
            )

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Scaled rewards of the responses, in the order given; one number for a text."""
        return (self.scorer.score(prompts, responses) - self.shift) * self.factor


CONTACT_SECONDS = 3.0
"""Seconds in which a reward server must answer before the first prompt."""
PROBE_TOLERANCE = 0.02
"""Largest difference of a served reward from the model's own that counts as rounding, relative to rewards above 1."""


@contextmanager
def serving(server: str, model: BradleyTerryRM, checkpoint: str, *, option: str) -> Iterator[RewardClient]:
    """Open a client of a server, after a check of one reward that it serves the model.

    Args:
        server: address, such as http://127.0.0.1:8000.
        model: the model in this process.
        checkpoint: path or name of the model, for error messages.
        option: name of the server's option, for error messages.

    Raises:
        ConfigError: if the server has other weights.
        RewardServerUnavailable: if it does not answer.
    """
    RewardClient(server, renderer=model.renderer, timeout_seconds=CONTACT_SECONDS).close()
    with RewardClient(server, renderer=model.renderer) as client:
        served, own = (float(scorer.score(["Hi."], ["Hello."])[0]) for scorer in (client, model))
        if not abs(served - own) <= PROBE_TOLERANCE * max(1.0, abs(own)):
            raise ConfigError(
                f"{option} {server} has other weights than {checkpoint}: it gives {served:.4f} where that gives "
                f"{own:.4f}; serve {checkpoint}, or name the model that is served"
            )
        yield client
