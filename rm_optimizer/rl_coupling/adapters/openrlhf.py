"""Reward function for OpenRLHF, whose `remote_url` names a Python file with a function `reward_func`.

The URL of `rm-opt serve` followed by `/get_reward` does the same over HTTP. `docs/rl-coupling.md` shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from threading import Lock
from typing import Any

from torch import Tensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import require_finite
from rm_optimizer.serving.service.inputs import RenderedTexts

RewardFunc = Callable[[Sequence[str], Sequence[str], Sequence[Any]], dict[str, Any]]


def openrlhf_reward_func(model: BradleyTerryRM) -> RewardFunc:
    """`reward_func(queries, prompts, labels)` with the raw rewards of a model in this process.

    Queries are whole conversations decoded by OpenRLHF, and `prompts` shows where each answer begins. They are read as
    by the server: special tokens and padding around a text do not change its reward, and a text that is too long loses
    tokens on the left. Threads that call the
    function at the same time take turns. OpenRLHF clips rewards to [-10, 10] by default (`--reward.clip_range`).

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
