"""The synthetic world as a policy and as a judge, for best-of-n with gold rewards and no language model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.pairs.pair import Prompt, Scorer, as_messages, digest, paired, prompt_id
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.errors import DataError


class WorldPolicy:
    """The policy that makes the pairs of a synthetic world.

    Args:
        world: the world.
    """

    def __init__(self, world: PreferenceWorld) -> None:
        self._world = world

    @property
    def identity(self) -> str:
        """Digest of the policy, which is the same for all worlds."""
        return digest(["the policy of the synthetic worlds"])

    def respond(self, prompt: Prompt, num_samples: int, seed: int) -> list[str]:
        """Draw responses to a prompt of the world.

        Raises:
            DataError: if the prompt is none of a synthetic world.
        """
        generator = np.random.default_rng([seed, int(prompt_id(prompt), 16)])
        try:
            return [self._world.sample_response(_text(prompt), generator) for _ in range(num_samples)]
        except ValueError as error:
            raise DataError(str(error)) from error


class WorldGold(Scorer):
    """The gold reward of a synthetic world.

    Args:
        world: the world.
    """

    def __init__(self, world: PreferenceWorld) -> None:
        self._world = world

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Gold rewards of the responses.

        Raises:
            DataError: if a prompt is none of a synthetic world.
        """
        rows = zip(*paired(prompts, responses), strict=True)
        try:
            rewards = [self._world.gold(_text(prompt), text) for prompt, text in rows]
        except ValueError as error:
            raise DataError(str(error)) from error
        return torch.tensor(rewards, dtype=torch.float32)


def _text(prompt: Prompt) -> str:
    return as_messages(prompt)[-1].content
