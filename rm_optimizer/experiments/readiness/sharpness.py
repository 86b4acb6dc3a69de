"""Sharpness of many small reward models at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.experiments.readiness.reward_models import Population, StackedRewards
from rm_optimizer.experiments.readiness.world import Texts

ITERATIONS = 30
_STEP = 1e-5
"""Length of the steps to both sides, in double precision: short, since a gradient jumps where a hidden unit ends."""


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
    for numbers, stack in models.stacks:
        found[list(numbers)] = _of_stack(stack, better, worse)
    return found


def _of_stack(stack: StackedRewards, better: Texts, worse: Texts) -> np.ndarray:
    stack = copy.deepcopy(stack)
    for parameter in stack.parameters:
        parameter.data = parameter.data.double()
        parameter.requires_grad_()
    at = [parameter.detach().clone() for parameter in stack.parameters]
    generator = torch.Generator().manual_seed(0)
    direction = _unit([torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in at])
    for _ in range(ITERATIONS):
        ahead, behind = (
            _gradient(stack, [part + step * way for part, way in zip(at, direction, strict=True)], better, worse)
            for step in (_STEP, -_STEP)
        )
        product = [(one - other) / (2 * _STEP) for one, other in zip(ahead, behind, strict=True)]
        value = _dots(direction, product)
        direction = _unit(product)
    return value.numpy()


def _gradient(stack: StackedRewards, at: Sequence[Tensor], better: Texts, worse: Texts) -> tuple[Tensor, ...]:
    """Gradient of each model's mean loss at other parameters."""
    with torch.no_grad():
        for parameter, value in zip(stack.parameters, at, strict=True):
            parameter.copy_(value)
    size = len(at[0])
    rewards = [
        stack.rewards(Texts(texts.prompts.expand(size, -1), texts.tokens.expand(size, -1, -1)))
        for texts in (better, worse)
    ]
    loss = -torch.nn.functional.logsigmoid(rewards[0] - rewards[1]).mean(dim=1).sum()
    return torch.autograd.grad(loss, stack.parameters)


def _dots(one: Sequence[Tensor], other: Sequence[Tensor]) -> Float[Tensor, " models"]:
    return torch.stack([(a * b).flatten(1).sum(dim=1) for a, b in zip(one, other, strict=True)]).sum(dim=0)


def _unit(parts: Sequence[Tensor]) -> list[Tensor]:
    norm = _dots(parts, parts).sqrt().clamp(min=1e-20)
    return [part / norm.view(-1, *[1] * (part.ndim - 1)) for part in parts]
