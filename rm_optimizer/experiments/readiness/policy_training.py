"""Reinforcement learning of many policies side by side, each against its own reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rm_optimizer.experiments.readiness.reward_models import Population
from rm_optimizer.experiments.readiness.world import Drawn, RewardWorld, Texts, log_policy_of, sample

GROUP, NUM_GROUPS = 8, 24
"""Responses to a prompt, and prompts of a step."""
CLIP = 1.0
"""Largest norm of a policy's gradient."""
EARLY = 3.0
"""Divergence, in nats, up to which a short run goes whose responses are probed."""
KEPT_STEPS = 3
"""Steps whose responses are kept of it."""
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_SCALE_ROWS = 2048


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

    @classmethod
    def unpenalized(cls, steps: int) -> Schedule:
        """No penalty at all."""
        return cls(1e-3, (0.0,) * steps)

    def beginning(self, steps: int) -> Schedule:
        """The first steps."""
        return replace(self, penalties=self.penalties[:steps])


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
    mean, std = _scale(world, models, prompts, generator)
    optimizer = _ClippedAdam(policies.parameters, schedule.lr)
    course: list[tuple[Tensor, Tensor, Tensor]] = []
    early: list[Texts] = []
    for penalty in schedule.penalties:
        asked = prompts[torch.randint(len(prompts), (NUM_GROUPS,), generator=generator)].repeat_interleave(GROUP)
        drawn = sample(policies, asked.expand(size, -1), generator)
        texts = Texts(asked.expand(size, -1), drawn.tokens)
        first = _first_log_policy(world, texts)
        reward = (models.rewards(texts) - mean) / std
        divergence = _divergence(drawn.log_policy, first)
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


def _scale(
    world: RewardWorld, models: Population, prompts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each model's reward under the first policy."""
    asked = prompts[torch.randint(len(prompts), (_SCALE_ROWS,), generator=generator)]
    reward = models.rewards(world.respond(asked, generator))
    return reward.mean(dim=1, keepdim=True), reward.std(dim=1, keepdim=True).clamp(min=1e-6)


def _first_log_policy(world: RewardWorld, texts: Texts) -> Float[Tensor, "models rows length vocab"]:
    """Logarithms of the first policy's probabilities along responses."""
    flat = Texts(texts.prompts.reshape(-1), texts.tokens.reshape(-1, texts.tokens.shape[-1]))
    with torch.no_grad():
        found = log_policy_of(world.policy, flat)
    return found.reshape(*texts.tokens.shape, -1)


def _divergence(log_policy: Tensor, first: Tensor) -> Float[Tensor, " models"]:
    """Mean over responses of the sum over places of the divergence of the next token's distribution."""
    return (log_policy.exp() * (log_policy - first)).sum(dim=(-1, -2)).mean(dim=1)


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
