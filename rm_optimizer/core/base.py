"""The base class of reward models, and what can score a response."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rm_optimizer.core.pairs.pair import PreferencePair as PreferencePair
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.rows.natural import Prompts, Texts, flat_groups, paired


@runtime_checkable
class Scorer(Protocol):
    """Anything that turns prompts and responses into rewards: a local model, an ensemble, a server's client."""

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Rewards of the responses, float32 on the CPU, in the order given; one number for a text."""
        ...

    def score_groups(self, prompts: Prompts, responses_of_each: Iterable[Texts]) -> list[Float[Tensor, " responses"]]:
        """Rewards of each prompt's responses; the prompt is computed once for them where the model allows it.

        Args:
            prompts: text or messages.
            responses_of_each: the responses to each prompt, in the same order.

        Raises:
            ValueError: if there are not as many groups of responses as prompts.
        """
        flat, texts, sizes = flat_groups(prompts, responses_of_each)
        return list(torch.split(self.score(flat, texts), sizes))


class BaseRewardModel(nn.Module, Scorer):
    """A module that gives one real reward to a tokenized sequence and can score text.

    A subclass gives `forward`, `compute_loss` and `tokenize`; `RewardModelLightning` trains it by its own loss.

    Args:
        model_name: name of the model, for the reader.
        device: device to move to, where the subclass does so; None is the parameters' device.
    """

    def __init__(self, model_name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__()
        self.model_name = model_name
        self._asked_device = device

    @property
    def device(self) -> torch.device:
        """Device of the parameters; without any, the one asked for."""
        parameter = next(self.parameters(), None)
        return torch.device(self._asked_device or "cpu") if parameter is None else parameter.device

    @abstractmethod
    def forward(
        self, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
    ) -> Float[Tensor, " sequences"]:
        """Rewards in float32."""

    @abstractmethod
    def compute_loss(
        self,
        chosen_ids: Int[Tensor, "pairs chosen_tokens"],
        chosen_mask: Int[Tensor, "pairs chosen_tokens"],
        rejected_ids: Int[Tensor, "pairs rejected_tokens"],
        rejected_mask: Int[Tensor, "pairs rejected_tokens"],
    ) -> Float[Tensor, ""]:
        """Mean loss of the pairs."""

    @abstractmethod
    def tokenize(self, prompt: Any, response: Any) -> Mapping[str, Tensor]:
        """`input_ids` and `attention_mask` of a prompt and a response, shape (1, tokens)."""

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Rewards of the responses, float32 on the CPU, in the order given; one number for a text."""
        rewards = []
        with torch.no_grad():
            for prompt, response in zip(*paired(prompts, responses), strict=True):
                tokens = {name: tensor.to(self.device) for name, tensor in self.tokenize(prompt, response).items()}
                rewards.append(self(tokens["input_ids"], tokens["attention_mask"]).float().cpu().reshape(()))
        found = torch.stack(rewards) if rewards else torch.zeros(0)
        return found[0] if isinstance(responses, str) else found

    def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` less the reward of `response_b`."""
        rewards = self.score([prompt, prompt], [response_a, response_b])
        return float(rewards[0] - rewards[1])
