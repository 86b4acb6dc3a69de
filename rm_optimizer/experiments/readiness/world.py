"""A seeded world: prompts, a policy that answers them, and a gold reward that too much of a good thing lowers.

A prompt is one of 8 topics in one of 8 styles, a response 8 tokens of 12. The gold reward adds, for each token, a
concave function of its count, and synergies of neighboring tokens that depend on the topic. Concavity matters: where
the gold reward only grows, most reward models lead to the same optimum and none is over-optimized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rm_optimizer.experiments.readiness.stacked_gru import StackedGru

VOCAB, LENGTH, KINDS, WIDTH = 12, 8, 8, 32
NUM_PROMPTS = KINDS * KINDS
FEATURES = 2 * KINDS
LABEL_BETA = 2.0
"""Inverse temperature of the Bradley-Terry labels, for a gold reward of unit spread within prompts."""
_SCALE_SAMPLES = 512


@dataclass(frozen=True)
class Texts:
    """Responses and the prompts that they answer.

    Args:
        prompts: number of each prompt.
        tokens: tokens of each response.
    """

    prompts: Int[Tensor, "*rows"]
    tokens: Int[Tensor, "*rows length"]


class RewardWorld:
    """Prompts, the policy before reinforcement learning, and the gold reward.

    Args:
        seed: seed of the world; different seeds give different worlds of one family.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.policy = StackedGru.drawn(1, VOCAB, FEATURES, WIDTH, VOCAB, generator, scale=3.0)
        self.stranger = StackedGru.drawn(1, VOCAB, FEATURES, WIDTH, VOCAB, generator, scale=3.0)
        """Another policy, whose responses are off-policy."""
        self._slopes = torch.randn(VOCAB, generator=generator)
        self._best_counts = 0.5 + 1.5 * torch.rand(VOCAB, generator=generator)
        synergies = torch.randn(KINDS, VOCAB, VOCAB, generator=generator)
        is_synergy = torch.rand(KINDS, VOCAB, VOCAB, generator=generator) < 0.12
        self._synergies = (1.3 * synergies * is_synergy).repeat_interleave(KINDS, dim=0)
        self._shift, self._scale = torch.zeros(NUM_PROMPTS), torch.ones(NUM_PROMPTS)
        self._shift, self._scale = self._moments(generator)

    def _moments(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mean of each prompt's gold reward under the policy, and the standard deviation within prompts."""
        prompts = torch.arange(NUM_PROMPTS).unsqueeze(1).expand(NUM_PROMPTS, _SCALE_SAMPLES)
        gold = self.gold(self.respond(prompts.reshape(-1), generator)).reshape(NUM_PROMPTS, _SCALE_SAMPLES)
        within = gold.var(dim=1).mean().sqrt()
        return gold.mean(dim=1), within.expand(NUM_PROMPTS)

    def gold(self, texts: Texts) -> Float[Tensor, "*rows"]:
        """Gold reward: mean 0 for each prompt and variance 1 within prompts under the policy."""
        prompts, tokens = texts.prompts, texts.tokens
        counts = torch.nn.functional.one_hot(tokens, VOCAB).sum(dim=-2).float()
        concave = counts - counts**2 / (2 * self._best_counts)
        linear = torch.where(self._slopes > 0, self._slopes * concave, self._slopes * counts).sum(dim=-1)
        pairs = self._synergies[prompts.unsqueeze(-1), tokens[..., :-1], tokens[..., 1:]]
        return (linear + pairs.sum(dim=-1) - self._shift[prompts]) / self._scale[prompts]

    def respond(
        self, prompts: Int[Tensor, " rows"], generator: torch.Generator, *, by: StackedGru | None = None
    ) -> Texts:
        """A response to each prompt.

        Args:
            prompts: numbers of the prompts.
            generator: source of the draws.
            by: the policy; None takes the world's.
        """
        with torch.no_grad():
            drawn = sample(by or self.policy, prompts.unsqueeze(0), generator)
        return Texts(prompts, drawn.tokens[0])

    def prefers_first(
        self, first: Float[Tensor, "*rows"], second: Float[Tensor, "*rows"], generator: torch.Generator
    ) -> Float[Tensor, "*rows"]:
        """Labels, 1 where the first is preferred: Bradley-Terry draws from gold rewards."""
        return torch.bernoulli(torch.sigmoid(LABEL_BETA * (first - second)), generator=generator)


def prompt_features(prompts: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows features"]:
    """Topic and style as two one-hot vectors."""
    kinds = (prompts // KINDS, prompts % KINDS)
    return torch.cat([torch.nn.functional.one_hot(kind, KINDS) for kind in kinds], dim=-1).float()


@dataclass(frozen=True)
class Drawn:
    """Responses of stacked policies.

    Args:
        tokens: tokens of each response.
        log_policy: logarithm of every token's probability at each place, with gradients.
    """

    tokens: Int[Tensor, "models rows length"]
    log_policy: Float[Tensor, "models rows length vocab"]

    @property
    def log_probability(self) -> Float[Tensor, "models rows"]:
        """Logarithm of each response's probability."""
        return self.log_policy.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1).sum(dim=-1)


def sample(policies: StackedGru, prompts: Int[Tensor, "models rows"], generator: torch.Generator) -> Drawn:
    """A response of each policy to each of its prompts, by inverse distribution functions of uniform draws."""
    state, tokens, logs = policies.begin(prompt_features(prompts)), [], []
    for place in range(LENGTH):
        log_policy = torch.log_softmax(policies.outputs(state), dim=-1)
        uniform = torch.rand(prompts.shape, generator=generator).unsqueeze(-1)
        token = (log_policy.detach().exp().cumsum(dim=-1) < uniform).sum(dim=-1).clamp(max=VOCAB - 1)
        tokens.append(token)
        logs.append(log_policy)
        if place + 1 < LENGTH:
            state = policies.step(state, token)
    return Drawn(torch.stack(tokens, dim=-1), torch.stack(logs, dim=-2))


def log_policy_of(policy: StackedGru, texts: Texts) -> Float[Tensor, "rows length vocab"]:
    """Logarithms of one policy's probabilities along responses of others."""
    state, logs = policy.begin(prompt_features(texts.prompts).unsqueeze(0)), []
    for place in range(LENGTH):
        logs.append(torch.log_softmax(policy.outputs(state), dim=-1))
        if place + 1 < LENGTH:
            state = policy.step(state, texts.tokens[:, place].unsqueeze(0))
    return torch.stack(logs, dim=-2)[0]
