"""Reward heads of decoders that are more than one linear layer without a bias, and token types of text pairs.

The configuration describes either under `reward_head`. Exports of these models hold a copy of this file as their
own code, which plain `transformers` runs with `trust_remote_code=True`; so it imports torch and transformers alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
"""Functions between the layers of a head, by name."""


def layers_of(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Linear layers from one size to the next, with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


class GatedHead(nn.Module):
    """A mixture of objectives, whose weights are read at the end of the prompt.

    `reward = total(objectives(last) * softmax(gate(prompt) / temperature))`, where `last` is the state at the last
    token and `prompt` the state at the marker that opens the answer. Reference: Wang et al., 2024, ArmoRM,
    https://arxiv.org/abs/2406.12845, equations 3 and 4.

    Args:
        sizes: widths of the gate, from the hidden size to the number of objectives.
        temperature: divisor of the gate's logits.
    """

    def __init__(self, sizes: Sequence[int], temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.objectives = nn.Linear(sizes[0], sizes[-1], bias=False)
        self.gate = layers_of(sizes, "relu")
        self.total = nn.Linear(sizes[-1], 1, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Rewards of shape (sequences, 1) from the two states, one after the other in the last axis."""
        last, prompt = states.to(self.objectives.weight.dtype).chunk(2, dim=-1)
        weights = torch.softmax(self.gate(prompt) / self.temperature, dim=-1)
        rewards: Tensor = self.total(self.objectives(last) * weights)
        return rewards


HEADS: Mapping[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "marker": lambda of: GatedHead(of["sizes"], of["temperature"]),
    "activation": lambda of: layers_of(of["sizes"], of["activation"]),
}
"""All heads beyond a linear layer without bias, by the setting that each has alone: a gated one, whose objectives may
be means of quantiles, and linear layers with an activation between them, or one layer with a bias."""


def head_of(described: Mapping[str, Any]) -> nn.Module:
    """The head that a configuration describes."""
    head = next(make(described) for setting, make in HEADS.items() if setting in described)
    return head[0] if isinstance(head, nn.Sequential) and len(head) == 1 else head


def marker_index(input_ids: Tensor, marker: Sequence[int]) -> Tensor:
    """Index of the last place in each row at which the marker's ids begin; -1 in a row without them."""
    if input_ids.shape[1] < len(marker):
        return torch.full_like(input_ids[:, 0], -1)
    found = input_ids.unfold(1, len(marker), 1).eq(torch.tensor(marker, device=input_ids.device)).all(dim=-1)
    places = torch.arange(1, found.shape[1] + 1, device=found.device) * found
    return places.amax(dim=1) - 1


def with_head(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of classifiers whose `score` is the head that the configuration describes."""

    class WithHead(base):  # type: ignore[misc]
        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.score = head_of(config.reward_head)

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
        ) -> SequenceClassifierOutputWithPast:
            """Rewards at the last attended token, of shape (sequences, 1), as `logits`."""
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            hidden = self.base_model(input_ids, attention_mask=mask, **options).last_hidden_state
            rows = torch.arange(len(input_ids), device=hidden.device)
            places = torch.arange(1, input_ids.shape[1] + 1, device=mask.device) * (mask != 0)
            states = hidden[rows, places.argmax(dim=1)]
            if (marker := self.config.reward_head.get("marker")) is not None:
                index = marker_index(input_ids, marker)
                if bool((index < 0).any()):
                    raise ValueError(f"the ids {marker}, at which the head reads the prompt, are not in every sequence")
                states = torch.cat([states, hidden[rows, index]], dim=-1)
            return SequenceClassifierOutputWithPast(logits=self.score(states))

    WithHead.__name__ = WithHead.__qualname__ = base.__name__
    return WithHead


def token_types(input_ids: Tensor, separator: int) -> Tensor:
    """Types of the tokens of text pairs: 0 up to the first separator, which is included, and 1 after it.

    Example:
        >>> token_types(torch.tensor([[1, 5, 2, 6, 2]]), separator=2)
        tensor([[0, 0, 0, 1, 1]])
    """
    is_end = (input_ids == separator).long()
    return (is_end.cumsum(dim=1) > is_end).long()


def with_token_types(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of classifiers that derives the token types of text pairs from the ids, whoever rendered them."""

    class WithTokenTypes(base):  # type: ignore[misc]
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            token_type_ids: Tensor | None = None,
            **options: Any,
        ) -> Any:
            """The classifier's output; types that are given are not read."""
            types = token_types(input_ids, self.config.reward_head["separator"])
            return super().forward(input_ids, attention_mask=attention_mask, token_type_ids=types, **options)

    WithTokenTypes.__name__ = WithTokenTypes.__qualname__ = base.__name__
    return WithTokenTypes


OWN_TYPE = "reward_head"
"""The `model_type` of a stored model that needs this code; `reward_head.model_type` is its backbone's."""


def with_own_type(base: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """A configuration under `OWN_TYPE`, which `transformers` refuses without this code; it gives the backbone's."""

    class RewardConfig(base):  # type: ignore[misc]
        model_type = OWN_TYPE

        @classmethod
        def from_pretrained(cls, source: Any, **options: Any) -> PretrainedConfig:
            """The backbone's configuration, with `reward_head`."""
            stored, left = base.get_config_dict(source, **options)
            return base.from_dict({**stored, "model_type": base.model_type}, **left)

    return RewardConfig
