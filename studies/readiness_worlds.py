"""Worlds with a known gold reward, populations of reward models, and policies optimized against them.

A prompt is one of 8 topics in one of 8 styles, a response 8 tokens of 12. The gold reward adds, for each token, a
concave function of its count, and synergies of neighboring tokens that depend on the topic. Concavity matters: where
the gold reward only grows, most reward models lead to the same optimum and none is over-optimized.

Models of a world are trained side by side: every parameter has a leading axis over models, and no operation mixes
models, so each has the numbers that it would have alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

VOCAB, LENGTH, KINDS, WIDTH = 12, 8, 8, 32
NUM_PROMPTS = KINDS * KINDS
FEATURES = 2 * KINDS
LABEL_BETA = 2.0
"""Inverse temperature of the Bradley-Terry labels, for a gold reward of unit spread within prompts."""
_SCALE_SAMPLES = 512
BATCH = 64
"""Pairs of a step."""
_BETA1, _BETA2, _MOMENTUM, _EPS = 0.9, 0.999, 0.9, 1e-8
GROUP, NUM_GROUPS = 8, 24
"""Responses to a prompt, and prompts of a step."""
CLIP = 1.0
"""Largest norm of a policy's gradient."""
EARLY = 3.0
"""Divergence, in nats, up to which a short run goes whose responses are probed."""
KEPT_STEPS = 3
"""Steps whose responses are kept of it."""
_SCALE_ROWS = 2048
ITERATIONS = 30
_STEP = 1e-5
"""Length of the steps to both sides, in double precision: short, since a gradient jumps where a hidden unit ends."""


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
    def drawn(cls, width: int, outputs: int, generator: torch.Generator, *, scale: float = 1.0) -> StackedGru:
        """One network at random weights.

        Args:
            width: size of the state.
            outputs: number of outputs.
            generator: source of the weights.
            scale: standard deviation of an output whose state has unit entries.
        """

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(1, *shape, generator=generator) * std

        return cls(
            tokens=normal(VOCAB + 1, 3 * width, std=0.7),
            hidden=normal(width, 3 * width, std=width**-0.5),
            bias=torch.zeros(1, 1, 3 * width),
            prompt=normal(FEATURES, width, std=0.7),
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
        return self.step(torch.tanh(prompts.to(self.prompt.dtype) @ self.prompt), start)

    def outputs(self, state: Float[Tensor, "models rows hidden"]) -> Float[Tensor, "models rows outputs"]:
        """Outputs of states."""
        return state @ self.out

    def rewards(self, texts: Texts) -> Float[Tensor, "models rows"]:
        """Reward of each network, of one output, for its own rows, from its last state."""
        state = self.begin(prompt_features(texts.prompts))
        for place in range(LENGTH):
            state = self.step(state, texts.tokens[..., place])
        return self.outputs(state).squeeze(-1)


@dataclass(frozen=True)
class Texts:
    """Responses and the prompts that they answer.

    Args:
        prompts: number of each prompt.
        tokens: tokens of each response.
    """

    prompts: Int[Tensor, "*rows"]
    tokens: Int[Tensor, "*rows length"]

    def repeated(self, models: int) -> Texts:
        """The texts with a leading axis over models, all of which have the same."""
        return Texts(self.prompts.expand(models, -1), self.tokens.expand(models, -1, -1))


class RewardWorld:
    """Prompts, the policy before reinforcement learning, and the gold reward.

    Args:
        seed: seed of the world; different seeds give different worlds of one family.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.policy = StackedGru.drawn(WIDTH, VOCAB, generator, scale=3.0)
        self.stranger = StackedGru.drawn(WIDTH, VOCAB, generator, scale=3.0)
        """Another policy, whose responses are off-policy."""
        self._slopes = torch.randn(VOCAB, generator=generator)
        self._best_counts = 0.5 + 1.5 * torch.rand(VOCAB, generator=generator)
        synergies = torch.randn(KINDS, VOCAB, VOCAB, generator=generator)
        is_synergy = torch.rand(KINDS, VOCAB, VOCAB, generator=generator) < 0.12
        self._synergies = (1.3 * synergies * is_synergy).repeat_interleave(KINDS, dim=0)
        self._shift, self._scale = torch.zeros(NUM_PROMPTS), torch.ones(NUM_PROMPTS)
        prompts = torch.arange(NUM_PROMPTS).repeat_interleave(_SCALE_SAMPLES)
        gold = self.gold(self.respond(prompts, generator)).reshape(NUM_PROMPTS, _SCALE_SAMPLES)
        self._shift, self._scale = gold.mean(dim=1), gold.var(dim=1).mean().sqrt().expand(NUM_PROMPTS)

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
        decays = [0.0, 0.01, 0.1] if optimizer == "adamw" else [0.0, 1e-4]
        found.append(
            RewardModelSpec(
                architecture=architectures[number % len(architectures)],
                width=(8, 32, 96)[(number // 3) % 3],
                optimizer=optimizer,
                lr=float(10 ** rng.uniform(-1.5, -0.5) if optimizer == "sgd" else 10 ** rng.uniform(-2.8, -1.8)),
                weight_decay=float(rng.choice(decays)),
                num_pairs=int(2 ** rng.uniform(7.5, 13)),
                flips=float(rng.choice([0.0, 0.1, 0.2, 0.3])),
                on_policy=float(rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])),
                epochs=int(rng.choice([2, 4, 8])),
                seed=int(rng.integers(2**31)),
            )
        )
    return found


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


def fresh_rewards(specs: Sequence[RewardModelSpec]) -> CountRewards | StackedGru:
    """Models of one architecture and width at the random start that each one's seed gives."""
    parts = [_fresh(spec) for spec in specs]
    stacked = [torch.cat(values).requires_grad_() for values in zip(*(part.parameters for part in parts), strict=True)]
    if specs[0].architecture == "gru":
        return StackedGru(*stacked)
    into, bias, out = stacked
    return CountRewards(into, bias, out, has_bigrams=specs[0].architecture == "bigram")


def _fresh(spec: RewardModelSpec) -> CountRewards | StackedGru:
    generator = torch.Generator().manual_seed(spec.seed)
    if spec.architecture == "gru":
        return StackedGru.drawn(spec.width, 1, generator)
    inputs = FEATURES + VOCAB + VOCAB**2 * (spec.architecture == "bigram")
    into = torch.randn(1, inputs, spec.width, generator=generator) * 0.3
    out = torch.randn(1, spec.width, 1, generator=generator) * spec.width**-0.5
    return CountRewards(into, torch.zeros(1, 1, spec.width), out, spec.architecture == "bigram")


def training_pairs(world: RewardWorld, spec: RewardModelSpec) -> tuple[Texts, Texts]:
    """Preferred and other responses of a model's pairs by its seed; both responses of a pair are of one policy."""
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
    chosen, rejected = torch.where(is_first, one, other), torch.where(is_first, other, one)
    return Texts(prompts, chosen), Texts(prompts, rejected)


def train_stack(world: RewardWorld, specs: Sequence[RewardModelSpec]) -> CountRewards | StackedGru:
    """Train models of one architecture and width on the Bradley-Terry loss, each as it would be alone.

    A model that has made its steps stays as it is while the others go on.
    """
    models, data = fresh_rewards(specs), [training_pairs(world, spec) for spec in specs]
    orders = [_batches(spec) for spec in specs]
    steps = _StackedSteps(models.parameters, specs)
    for step in range(max(spec.num_steps for spec in specs)):
        rows = [order[min(step, len(order) - 1)] for order in orders]
        both = [
            Texts(torch.cat([side.prompts[row] for side in pairs]), torch.cat([side.tokens[row] for side in pairs]))
            for pairs, row in zip(data, rows, strict=True)
        ]
        texts = Texts(torch.stack([each.prompts for each in both]), torch.stack([each.tokens for each in both]))
        loss = preference_loss(*models.rewards(texts).chunk(2, dim=1))
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
        parts = zip(self._parameters, gradients, self._first, self._second, strict=True)
        for parameter, gradient, first, second in parts:
            shape = (-1, *[1] * (parameter.ndim - 1))
            is_sgd, rate = self._is_sgd.view(shape), (self._lr * (step < self._steps)).view(shape)
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
    stacks: tuple[tuple[tuple[int, ...], CountRewards | StackedGru], ...]

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
        if texts.prompts.ndim == 1:
            texts = texts.repeated(len(self.specs))
        found = torch.empty(texts.prompts.shape)
        for numbers, stack in self.stacks:
            at = list(numbers)
            found[at] = stack.rewards(Texts(texts.prompts[at], texts.tokens[at]))
        return found


def top_eigenvalues(models: Population, better: Texts, worse: Texts) -> Float[np.ndarray, " models"]:
    """Largest eigenvalue by absolute value of each model's Hessian of the Bradley-Terry loss, by power iteration.

    Products with the Hessian are central differences of gradients, since sums of embeddings have no second derivative
    in PyTorch.

    Args:
        models: the models.
        better: preferred response of each pair.
        worse: the other one.
    """
    found = np.empty(len(models.specs))
    for numbers, original in models.stacks:
        stack, generator = copy.deepcopy(original), torch.Generator().manual_seed(0)
        for parameter in stack.parameters:
            parameter.data = parameter.data.double()
            parameter.requires_grad_()
        at = [parameter.detach().clone() for parameter in stack.parameters]
        direction = _unit([torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in at])
        for _ in range(ITERATIONS):
            sides = []
            for step in (_STEP, -_STEP):
                for parameter, value, way in zip(stack.parameters, at, direction, strict=True):
                    parameter.data.copy_(value + step * way)
                rewards = (stack.rewards(each.repeated(len(numbers))) for each in (better, worse))
                sides.append(torch.autograd.grad(preference_loss(*rewards), stack.parameters))
            product = [(ahead - behind) / (2 * _STEP) for ahead, behind in zip(*sides, strict=True)]
            eigenvalues, direction = _dots(direction, product), _unit(product)
        found[list(numbers)] = eigenvalues.numpy()
    return found


def preference_loss(better: Float[Tensor, "models pairs"], worse: Float[Tensor, "models pairs"]) -> Float[Tensor, ""]:
    """Sum over the models of each one's mean Bradley-Terry loss."""
    return -torch.nn.functional.logsigmoid(better - worse).mean(dim=1).sum()


def _dots(one: Sequence[Tensor], other: Sequence[Tensor]) -> Float[Tensor, " models"]:
    return torch.stack([(a * b).flatten(1).sum(dim=1) for a, b in zip(one, other, strict=True)]).sum(dim=0)


def _unit(parts: Sequence[Tensor]) -> list[Tensor]:
    norm = _dots(parts, parts).sqrt().clamp(min=1e-20)
    return [part / norm.view(-1, *[1] * (part.ndim - 1)) for part in parts]


class Algorithm(StrEnum):
    """Way to turn rewards of a group of responses into advantages, and place of the KL penalty."""

    rloo = "rloo"
    """Reward less the mean of the group's others; the penalty is part of the reward (Ahmadian et al., 2024)."""
    grpo = "grpo"
    """Reward less the group's mean, over its standard deviation; the penalty is in the loss (Shao et al., 2024)."""


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps of a policy.

    Args:
        lr: learning rate.
        penalties: weight of the KL penalty at each step, for rewards of unit spread under the first policy.
    """

    lr: float
    penalties: tuple[float, ...]

    @classmethod
    def annealed(cls, steps: int) -> Schedule:
        """A penalty that falls geometrically, so slowly that a policy stays near the best one of its divergence.

        The best policy under a penalty b is the first one times exp(reward / b); where rewards are normal its
        divergence is 1 / (2 b^2) nats (Korbak et al., 2022): 1.4 at the first penalty, 6 at 0.29.
        """
        first, last = 0.6, 0.02
        return cls(3e-3, tuple(first * (last / first) ** (step / steps) for step in range(steps)))


@dataclass(frozen=True)
class PolicyCourse:
    """Course of policies during training, before each step.

    Args:
        divergence: KL divergence from the first policy, in nats a response, exact for each token given those before.
        gold: mean gold reward.
        proxy: mean reward by the reward model, standardized under the first policy.
        early: each policy's last responses before its divergence exceeds `EARLY` nats.
    """

    divergence: Float[Tensor, "steps models"]
    gold: Float[Tensor, "steps models"]
    proxy: Float[Tensor, "steps models"]
    early: Texts


def train_policies(
    world: RewardWorld,
    models: Population,
    prompts: Int[Tensor, " prompts"],
    algorithm: Algorithm,
    *,
    schedule: Schedule,
    seed: int,
) -> PolicyCourse:
    """Train a policy against each reward model, from the world's policy, by Adam.

    Gradients are clipped for each policy on its own.

    Args:
        world: the world.
        models: its reward models.
        prompts: prompts to train on.
        algorithm: name of the algorithm, which determines the advantages.
        schedule: optimizer steps.
        seed: seed of the prompts, which all policies share, and of their responses.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(models.specs)
    policies = world.policy.copies(size)
    asked = prompts[torch.randint(len(prompts), (_SCALE_ROWS,), generator=generator)]
    unscaled = models.rewards(world.respond(asked, generator))
    mean, std = unscaled.mean(dim=1, keepdim=True), unscaled.std(dim=1, keepdim=True).clamp(min=1e-6)
    optimizer = _ClippedAdam(policies.parameters, schedule.lr)
    course: list[tuple[Tensor, Tensor, Tensor]] = []
    early: list[Texts] = []
    for penalty in schedule.penalties:
        asked = prompts[torch.randint(len(prompts), (NUM_GROUPS,), generator=generator)].repeat_interleave(GROUP)
        drawn = sample(policies, asked.expand(size, -1), generator)
        texts = Texts(asked.expand(size, -1), drawn.tokens)
        flat = Texts(texts.prompts.reshape(-1), texts.tokens.reshape(-1, LENGTH))
        with torch.no_grad():
            first = log_policy_of(world.policy, flat).reshape(*texts.tokens.shape, -1)
        reward = (models.rewards(texts) - mean) / std
        divergence = (drawn.log_policy.exp() * (drawn.log_policy - first)).sum(dim=(-1, -2)).mean(dim=1)
        with torch.no_grad():
            course.append((divergence.detach(), world.gold(texts).mean(dim=1), reward.mean(dim=1)))
            early = _kept(early, texts, divergence <= EARLY)
        loss = _loss(algorithm, reward, drawn, first, divergence, penalty)
        optimizer.step(torch.autograd.grad(loss, policies.parameters))
    kept = Texts(torch.cat([each.prompts for each in early], 1), torch.cat([each.tokens for each in early], 1))
    divergences, gold, proxy = (torch.stack(values) for values in zip(*course, strict=True))
    return PolicyCourse(divergences, gold, proxy, kept)


def _kept(before: Sequence[Texts], now: Texts, is_early: Bool[Tensor, " models"]) -> list[Texts]:
    """Responses of the last `KEPT_STEPS` steps of each policy, this one among them where it is early."""
    if len(before) < KEPT_STEPS:
        return [*before, now]
    at = is_early.unsqueeze(1)
    moved = [*before[1:], now]
    return [
        Texts(torch.where(at, new.prompts, old.prompts), torch.where(at.unsqueeze(2), new.tokens, old.tokens))
        for old, new in zip(before, moved, strict=True)
    ]


def advantages(rewards: Float[Tensor, "models rows"], algorithm: Algorithm) -> Float[Tensor, "models rows"]:
    """Advantages of responses in groups of `GROUP` neighbors."""
    groups = rewards.reshape(len(rewards), -1, GROUP)
    centered = groups - groups.mean(dim=2, keepdim=True)
    if algorithm is Algorithm.rloo:
        centered = centered * GROUP / (GROUP - 1)
    else:
        centered = centered / (groups.std(dim=2, keepdim=True) + 1e-4)
    return centered.reshape(rewards.shape)


def _loss(
    algorithm: Algorithm, reward: Tensor, drawn: Drawn, first: Tensor, divergence: Tensor, penalty: float
) -> Float[Tensor, ""]:
    """Sum of the policies' losses."""
    log_probability = drawn.log_probability
    if algorithm is Algorithm.rloo:
        at_first = first.gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1).sum(dim=-1)
        reward = reward - penalty * (log_probability.detach() - at_first)
    loss = -(advantages(reward, algorithm) * log_probability).mean(dim=1).sum()
    return loss + penalty * divergence.sum() if algorithm is Algorithm.grpo else loss


class _ClippedAdam:
    """Adam over stacked parameters, with the gradient's norm clipped for each model on its own."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self._parameters = parameters
        self._lr = lr
        self._first = [torch.zeros_like(parameter) for parameter in parameters]
        self._second = [torch.zeros_like(parameter) for parameter in parameters]
        self._count = 0

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...]) -> None:
        self._count += 1
        squares = sum((gradient.flatten(1) ** 2).sum(dim=1) for gradient in gradients)
        factor = (CLIP / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp(max=1.0)
        for parameter, gradient, first, second in zip(
            self._parameters, gradients, self._first, self._second, strict=True
        ):
            clipped = gradient * factor.view(-1, *[1] * (gradient.ndim - 1))
            first.lerp_(clipped, 1 - _BETA1)
            second.mul_(_BETA2).addcmul_(clipped, clipped, value=1 - _BETA2)
            correction = (1 - _BETA2**self._count) ** 0.5 / (1 - _BETA1**self._count)
            parameter.sub_(self._lr * correction * first / (second.sqrt() + _EPS))
