"""Populations of reward models that differ in architecture, width, optimizer, data and noise, trained side by side.

Models of one architecture and width are one stack. Each has its own pairs, labels, learning rate, optimizer and number
of steps, so that stacking changes no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rm_optimizer.experiments.readiness.stacked_gru import StackedGru
from rm_optimizer.experiments.readiness.world import (
    FEATURES,
    LENGTH,
    NUM_PROMPTS,
    VOCAB,
    RewardWorld,
    Texts,
    prompt_features,
)

BATCH = 64
"""Pairs of a step."""
MOST_PAIRS = 8192
_BETA1, _BETA2, _MOMENTUM, _EPS = 0.9, 0.999, 0.9, 1e-8


@dataclass(frozen=True)
class RewardModelSpec:
    """One reward model of a population.

    Args:
        architecture: bag (counts of tokens), bigram (counts of neighbors too) or gru.
        width: hidden units.
        optimizer: adam, adamw or sgd (with momentum).
        lr: learning rate.
        weight_decay: decoupled for adamw, added to the gradient for the others.
        num_pairs: training pairs.
        flips: share of the labels that are turned around, on top of their Bradley-Terry noise.
        on_policy: share of the pairs whose responses are the policy's.
        epochs: passes over the pairs.
        seed: seed of weights, pairs and labels.
    """

    architecture: str
    width: int
    optimizer: str
    lr: float
    weight_decay: float
    num_pairs: int
    flips: float
    on_policy: float
    epochs: int
    seed: int

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return self.epochs * math.ceil(self.num_pairs / BATCH)


def population(
    world_seed: int, size: int, *, architectures: Sequence[str] = ("bag", "bigram", "gru")
) -> list[RewardModelSpec]:
    """Reward models of a world, drawn by its seed; architectures, widths and optimizers come equally often.

    Args:
        world_seed: seed of the world.
        size: number of models.
        architectures: architectures to take.
    """
    rng = np.random.default_rng([world_seed, 17])
    found = []
    for number in range(size):
        optimizer = ("adam", "adamw", "sgd")[(number // 9 + number) % 3]
        found.append(
            RewardModelSpec(
                architecture=architectures[number % len(architectures)],
                width=(8, 32, 96)[(number // 3) % 3],
                optimizer=optimizer,
                lr=float(10 ** rng.uniform(-1.5, -0.5) if optimizer == "sgd" else 10 ** rng.uniform(-2.8, -1.8)),
                weight_decay=float(rng.choice([0.0, 0.01, 0.1]))
                if optimizer == "adamw"
                else float(rng.choice([0.0, 1e-4])),
                num_pairs=int(2 ** rng.uniform(7.5, 13)),
                flips=float(rng.choice([0.0, 0.1, 0.2, 0.3])),
                on_policy=float(rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])),
                epochs=int(rng.choice([2, 4, 8])),
                seed=int(rng.integers(2**31)),
            )
        )
    return found


class StackedRewards(Protocol):
    """Reward models of one architecture and width."""

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters, each with the models first."""
        ...

    def rewards(self, texts: Texts) -> Float[Tensor, "models rows"]:
        """Reward of each model for its own rows of texts, of the shape models, rows."""
        ...


@dataclass
class CountRewards:
    """A hidden layer over counts of tokens, of neighboring tokens if asked, and the prompt.

    Args:
        into: weights into the hidden layer.
        bias: bias of the hidden layer.
        out: weights out of it.
        has_bigrams: count neighbors too.
    """

    into: Float[Tensor, "models inputs hidden"]
    bias: Float[Tensor, "models 1 hidden"]
    out: Float[Tensor, "models hidden 1"]
    has_bigrams: bool

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters, each with the models first."""
        return [self.into, self.bias, self.out]

    def rewards(self, texts: Texts) -> Float[Tensor, "models rows"]:
        """Reward of each model for its own rows; sums of the rows of `into` that stand for what occurs."""
        topics, styles = texts.prompts // 8, texts.prompts % 8
        at = [topics.unsqueeze(-1), 8 + styles.unsqueeze(-1), FEATURES + texts.tokens]
        if self.has_bigrams:
            at.append(FEATURES + VOCAB + texts.tokens[..., :-1] * VOCAB + texts.tokens[..., 1:])
        index = torch.cat(at, dim=-1)
        models, rows, active = index.shape
        width = self.into.shape[-1]
        offset = (torch.arange(models) * self.into.shape[1]).view(-1, 1, 1)
        summed = torch.nn.functional.embedding_bag(
            (index + offset).reshape(models * rows, active), self.into.reshape(-1, width), mode="sum"
        )
        hidden = torch.relu(summed.view(models, rows, width) + self.bias)
        return (hidden @ self.out).squeeze(-1)


@dataclass
class GruRewards:
    """A recurrent network whose last state gives the reward."""

    gru: StackedGru

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters, each with the models first."""
        return self.gru.parameters

    def rewards(self, texts: Texts) -> Float[Tensor, "models rows"]:
        """Reward of each model for its own rows."""
        state = self.gru.begin(prompt_features(texts.prompts))
        for place in range(LENGTH):
            state = self.gru.step(state, texts.tokens[..., place])
        return self.gru.outputs(state).squeeze(-1)


def fresh_rewards(specs: Sequence[RewardModelSpec]) -> StackedRewards:
    """Models of one architecture and width at the random start that each one's seed gives."""
    parts = [_fresh(spec) for spec in specs]
    stacked = [torch.cat(values).requires_grad_() for values in zip(*(part.parameters for part in parts), strict=True)]
    if specs[0].architecture == "gru":
        return GruRewards(StackedGru(*stacked))
    into, bias, out = stacked
    return CountRewards(into, bias, out, has_bigrams=specs[0].architecture == "bigram")


def _fresh(spec: RewardModelSpec) -> StackedRewards:
    generator = torch.Generator().manual_seed(spec.seed)
    if spec.architecture == "gru":
        return GruRewards(StackedGru.drawn(1, VOCAB, FEATURES, spec.width, 1, generator))
    inputs = FEATURES + VOCAB + VOCAB**2 * (spec.architecture == "bigram")
    into = torch.randn(1, inputs, spec.width, generator=generator) * 0.3
    out = torch.randn(1, spec.width, 1, generator=generator) * spec.width**-0.5
    return CountRewards(into, torch.zeros(1, 1, spec.width), out, spec.architecture == "bigram")


@dataclass(frozen=True)
class LabeledPairs:
    """Pairs of a model: the preferred response and the other one, as labeled."""

    prompts: Int[Tensor, " pairs"]
    chosen: Int[Tensor, "pairs length"]
    rejected: Int[Tensor, "pairs length"]


def training_pairs(world: RewardWorld, spec: RewardModelSpec) -> LabeledPairs:
    """The pairs of a reward model, drawn and labeled by its seed; both responses of a pair are of one policy."""
    generator = torch.Generator().manual_seed(spec.seed + 1)
    prompts = torch.randint(NUM_PROMPTS, (spec.num_pairs,), generator=generator)
    is_own = torch.rand(spec.num_pairs, generator=generator) < spec.on_policy
    sides = []
    for _ in range(2):
        own, strange = (world.respond(prompts, generator, by=by).tokens for by in (world.policy, world.stranger))
        sides.append(torch.where(is_own.unsqueeze(-1), own, strange))
    one, other = sides
    gold, others_gold = (world.gold(Texts(prompts, side)) for side in sides)
    prefers_first = world.prefers_first(gold, others_gold, generator)
    is_flipped = torch.rand(spec.num_pairs, generator=generator) < spec.flips
    is_first = ((prefers_first > 0.5) ^ is_flipped).unsqueeze(-1)
    return LabeledPairs(prompts, torch.where(is_first, one, other), torch.where(is_first, other, one))


def train_stack(world: RewardWorld, specs: Sequence[RewardModelSpec]) -> StackedRewards:
    """Train models of one architecture and width on the Bradley-Terry loss, each as it would be alone.

    A model that has made its steps stays as it is while the others go on.
    """
    models, data = fresh_rewards(specs), [training_pairs(world, spec) for spec in specs]
    orders = [_batches(spec) for spec in specs]
    steps = _StackedSteps(models.parameters, specs)
    for step in range(max(spec.num_steps for spec in specs)):
        rows = [order[min(step, len(order) - 1)] for order in orders]
        chosen, rejected = (
            Texts(
                torch.stack([pairs.prompts[row] for pairs, row in zip(data, rows, strict=True)]),
                torch.stack([getattr(pairs, side)[row] for pairs, row in zip(data, rows, strict=True)]),
            )
            for side in ("chosen", "rejected")
        )
        both = Texts(torch.cat([chosen.prompts, rejected.prompts], 1), torch.cat([chosen.tokens, rejected.tokens], 1))
        better, worse = models.rewards(both).chunk(2, dim=1)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean(dim=1).sum()
        steps.take(torch.autograd.grad(loss, models.parameters), step)
    for parameter in models.parameters:
        parameter.requires_grad_(False)
    return models


def _batches(spec: RewardModelSpec) -> Int[Tensor, "steps batch"]:
    """Positions of the pairs of each step; the last batch of a pass is filled up from its beginning."""
    generator = torch.Generator().manual_seed(spec.seed + 2)
    passes = []
    for _ in range(spec.epochs):
        order = torch.randperm(spec.num_pairs, generator=generator)
        whole = math.ceil(spec.num_pairs / BATCH) * BATCH
        passes.append(order.repeat(math.ceil(whole / spec.num_pairs))[:whole].view(-1, BATCH))
    return torch.cat(passes)


class _StackedSteps:
    """Adam, AdamW and SGD with momentum over stacked parameters, each model with its own."""

    def __init__(self, parameters: Sequence[Tensor], specs: Sequence[RewardModelSpec]) -> None:
        self._parameters = parameters
        self._first = [torch.zeros_like(parameter) for parameter in parameters]
        self._second = [torch.zeros_like(parameter) for parameter in parameters]
        self._lr = torch.tensor([spec.lr for spec in specs])
        self._is_sgd = torch.tensor([spec.optimizer == "sgd" for spec in specs])
        self._decay = torch.tensor([spec.weight_decay for spec in specs])
        self._is_decoupled = torch.tensor([spec.optimizer == "adamw" for spec in specs])
        self._steps = torch.tensor([spec.num_steps for spec in specs])

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor], step: int) -> None:
        lr = self._lr * (step < self._steps)
        parts = zip(self._parameters, gradients, self._first, self._second, strict=True)
        for parameter, gradient, first, second in parts:
            shape = (-1, *[1] * (parameter.ndim - 1))
            is_sgd, rate = self._is_sgd.view(shape), lr.view(shape)
            coupled = (self._decay * ~self._is_decoupled).view(shape)
            gradient = gradient + coupled * parameter
            first.mul_(torch.where(is_sgd, _MOMENTUM, _BETA1)).add_(
                torch.where(is_sgd, gradient, (1 - _BETA1) * gradient)
            )
            second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
            correction = math.sqrt(1 - _BETA2 ** (step + 1)) / (1 - _BETA1 ** (step + 1))
            adam = first * correction / (second.sqrt() + _EPS)
            decoupled = (self._decay * self._is_decoupled).view(shape)
            parameter.mul_(1 - rate * decoupled).sub_(rate * torch.where(is_sgd, first, adam))


@dataclass(frozen=True)
class Population:
    """Trained reward models of a world in the order of their specs, stored as stacks.

    Args:
        specs: the models.
        stacks: positions of the models of each stack, and the stack.
    """

    specs: tuple[RewardModelSpec, ...]
    stacks: tuple[tuple[tuple[int, ...], StackedRewards], ...]

    @classmethod
    def trained(cls, world: RewardWorld, specs: Sequence[RewardModelSpec]) -> Population:
        """Train the models of a population."""
        kinds: dict[tuple[str, int], list[int]] = {}
        for number, spec in enumerate(specs):
            kinds.setdefault((spec.architecture, spec.width), []).append(number)
        return cls(
            tuple(specs),
            tuple((tuple(numbers), train_stack(world, [specs[n] for n in numbers])) for numbers in kinds.values()),
        )

    @torch.no_grad()
    def rewards(self, texts: Texts) -> Float[Tensor, "models rows"]:
        """Rewards of all models.

        Args:
            texts: rows that all models score, or, with a leading axis over models, each one's own.
        """
        is_shared, size = texts.prompts.ndim == 1, len(self.specs)
        found = torch.empty(size, texts.prompts.shape[-1])
        for numbers, stack in self.stacks:
            at = list(numbers)
            prompts = texts.prompts.expand(len(at), -1) if is_shared else texts.prompts[at]
            tokens = texts.tokens.expand(len(at), -1, -1) if is_shared else texts.tokens[at]
            found[at] = stack.rewards(Texts(prompts, tokens))
        return found
