"""Gated recurrent networks of many models as one tensor: every parameter has a leading axis over models.

Each model's numbers are those it would have alone, since no operation mixes models. One product of a batch of small
matrices takes the place of a loop over models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass
class StackedGru:
    """Parameters of recurrent networks over short sequences of tokens, begun by a prompt's features (Cho et al., 2014).

    Args:
        tokens: gates' input from each token; the last row belongs to the start of a sequence.
        hidden: gates' input from the state.
        bias: gates' constant input from the state, inside the reset gate.
        prompt: state before the first token, from the prompt's features.
        out: outputs from the state.
    """

    tokens: Float[Tensor, "models symbols gates"]
    hidden: Float[Tensor, "models hidden gates"]
    bias: Float[Tensor, "models one gates"]
    prompt: Float[Tensor, "models features hidden"]
    out: Float[Tensor, "models hidden outputs"]

    @classmethod
    def drawn(
        cls,
        models: int,
        vocab: int,
        features: int,
        width: int,
        outputs: int,
        generator: torch.Generator,
        *,
        scale: float = 1.0,
    ) -> StackedGru:
        """Networks at random weights.

        Args:
            models: number of networks.
            vocab: number of tokens.
            features: size of a prompt's features.
            width: size of the state.
            outputs: number of outputs.
            generator: source of the weights.
            scale: standard deviation of an output whose state has unit entries.
        """

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(models, *shape, generator=generator) * std

        return cls(
            tokens=normal(vocab + 1, 3 * width, std=0.7),
            hidden=normal(width, 3 * width, std=width**-0.5),
            bias=torch.zeros(models, 1, 3 * width),
            prompt=normal(features, width, std=0.7),
            out=normal(width, outputs, std=scale * width**-0.5),
        )

    @property
    def parameters(self) -> list[Tensor]:
        """The five tensors."""
        return [self.tokens, self.hidden, self.bias, self.prompt, self.out]

    def copies(self, models: int) -> StackedGru:
        """Copies of the first network, with gradients of their own."""
        return StackedGru(
            *(part[:1].detach().expand(models, *part.shape[1:]).clone().requires_grad_() for part in self.parameters)
        )

    def start(self, prompts: Float[Tensor, "models rows features"]) -> Float[Tensor, "models rows hidden"]:
        """States before the first token."""
        return torch.tanh(prompts.to(self.prompt.dtype) @ self.prompt)

    def step(
        self, state: Float[Tensor, "models rows hidden"], tokens: Int[Tensor, "models rows"]
    ) -> Float[Tensor, "models rows hidden"]:
        """States after one more token."""
        models = torch.arange(tokens.shape[0]).unsqueeze(1)
        given = self.tokens[models, tokens]
        kept = torch.baddbmm(self.bias, state, self.hidden)
        width = state.shape[-1]
        gates = torch.sigmoid(given[..., : 2 * width] + kept[..., : 2 * width])
        fresh = torch.tanh(given[..., 2 * width :] + gates[..., :width] * kept[..., 2 * width :])
        return torch.lerp(fresh, state, gates[..., width:])

    def begin(self, prompts: Float[Tensor, "models rows features"]) -> Float[Tensor, "models rows hidden"]:
        """States after the token that starts every sequence."""
        start = torch.full(prompts.shape[:2], self.tokens.shape[1] - 1)
        return self.step(self.start(prompts), start)

    def outputs(self, state: Float[Tensor, "models rows hidden"]) -> Float[Tensor, "models rows outputs"]:
        """Outputs of states."""
        return state @ self.out
