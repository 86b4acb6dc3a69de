"""Checks that the first step of a training run followed its optimizer's rule.

The first step starts from an empty state, so each rule has a closed form in the gradient. An optimizer can become
another one without an error. Muon on flattened parameters is AdamW. SAM takes AdamW's step if its closure is called
only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.registry import OPTIMIZERS

TOLERANCE = 1e-3
"""Largest error of a closed form, relative to the largest entry of the step."""
MATRICES = 4
"""Number of matrices of each group whose singular values are computed."""
SINGULAR_VALUES = (0.6, 1.35)
"""Range of Newton-Schulz's singular values after five iterations, 0.68 to 1.13, with room for bfloat16."""


StartingPoint: TypeAlias = Sequence[tuple[float, Sequence[Tensor]]]
"""Learning rate of each group of an optimizer and copies of its parameters, before the first step."""


@dataclass(frozen=True)
class FirstStep:
    """First step of one parameter.

    Args:
        start: value before the step.
        moved: value before the step minus the value after it.
        gradient: gradient of the step.
        group: options of the parameter's group.
        rate: learning rate of the step.
    """

    start: Tensor
    moved: Tensor
    gradient: Tensor
    group: Mapping[str, Any]
    rate: float

    @property
    def decay(self) -> float:
        """Weight decay of the group."""
        return float(self.group["weight_decay"])

    @property
    def without_decay(self) -> Tensor:
        """Step minus the part of decoupled weight decay."""
        return self.moved - self.start * (self.rate * self.decay)

    @property
    def regularized(self) -> Tensor:
        """Gradient of the loss with an L2 penalty."""
        return self.gradient + self.start * self.decay

    def is_close(self, moved: Tensor, expected: Tensor) -> bool:
        """True if a step equals the expected one within the tolerance and the rounding of the weights."""
        rounding = 4 * torch.finfo(self.start.dtype).eps * self.start.abs().max()
        return bool((moved - expected).abs().max() <= TOLERANCE * expected.abs().max() + rounding)


Rule = Callable[[list[FirstStep]], str | None]
"""Function that returns the fault of the first steps of a group's parameters, or None."""


def mechanism_state(optimizer: Optimizer) -> StartingPoint:
    """Copy the parameters and learning rates; to be called before the first step."""
    groups = optimizer.param_groups
    return [(float(group["lr"]), [p.detach().clone() for p in group["params"]]) for group in groups]


def check_mechanism(optimizer: Optimizer, name: str, before: StartingPoint, *, passes: int) -> None:
    """Refuse an optimizer whose first step did not follow its rule.

    Args:
        optimizer: optimizer that has taken one step; gradients of that step are still in the parameters.
        name: name in the registry.
        before: result of `mechanism_state` before the step.
        passes: number of forward and backward passes of the step; the micro-batches of one pass count once.

    Raises:
        ConfigError: if the number of passes or a group's step is wrong, or no parameter had a gradient.
    """
    wanted = OPTIMIZERS[name].passes_per_step
    if passes != wanted:
        raise ConfigError(f"optimizer={name} must compute {wanted} passes in a step, got {passes}; leave this arm out")
    with_gradient = 0
    for group, (rate, weights) in zip(optimizer.param_groups, before, strict=True):
        steps, rule = [], RULES.get(group["algorithm"])
        for p, start in zip(group["params"], weights, strict=True):
            if p.grad is not None and rate > 0 and bool(p.grad.any()):
                steps.append(FirstStep(start, start - p.detach(), p.grad, group, rate))
        with_gradient += len(steps)
        if rule is not None and (lack := rule(steps)) is not None:
            raise ConfigError(
                f"optimizer={name} did not take its own first step on the group {group['role']}: {lack}; leave this "
                "arm out, or train in 32-true or bf16-mixed on one device"
            )
    if not with_gradient:
        raise ConfigError(f"optimizer={name} had no gradient in its first step, so nothing trains; leave this arm out")


def _equal(moved: Callable[[FirstStep], Tensor], expected: Callable[[FirstStep], Tensor], fault: str) -> Rule:
    """Rule that compares a form of the step with its closed form."""
    return lambda steps: None if all(step.is_close(moved(step), expected(step)) for step in steps) else fault


def _signed(gradient: Tensor, step: FirstStep) -> Tensor:
    """First step of Adam, ``lr g / (|g| + eps)``."""
    return step.rate * gradient / (gradient.abs() + float(step.group["eps"]))


def _muon(steps: list[FirstStep]) -> str | None:
    """Check for singular values of about 1 and a product with the gradient of about the gradient's nuclear norm.

    Among matrices of spectral norm 1 only the gradient's orthogonal factor has a product equal to the nuclear norm. For
    all others the product is smaller.
    """
    low, high = SINGULAR_VALUES
    for step in islice(steps, MATRICES):
        if step.start.ndim != 2:
            return "its parameters are not matrices"
        rows, columns = step.start.shape
        match = step.group["adjust_lr_fn"] == "match_rms_adamw"
        scale = step.rate * (0.2 * sqrt(max(rows, columns)) if match else sqrt(max(1, rows / columns)))
        orthogonal, gradient = step.without_decay.double() / scale, step.gradient.double()
        alignment = float((orthogonal * gradient).sum() / torch.linalg.matrix_norm(gradient, "nuc"))
        if float(torch.linalg.matrix_norm(orthogonal, 2)) > high or not low <= alignment <= high:
            return "the step is not orthogonal"
    return None


_MOVED, _WITHOUT_DECAY = attrgetter("moved"), attrgetter("without_decay")
_NOT_ADAM = "the step is not lr g / (|g| + eps)"
_ADAMW = _equal(_WITHOUT_DECAY, lambda step: _signed(step.gradient, step), _NOT_ADAM)
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "adam": _equal(_MOVED, lambda step: _signed(step.regularized, step), _NOT_ADAM),
        **dict.fromkeys(("adamw", "sam", "schedulefree"), _ADAMW),
        "sgd": _equal(
            _MOVED,
            lambda step: step.rate * (1 + step.group["momentum"] * step.group["nesterov"]) * step.regularized,
            "the step is not parallel to the gradient",
        ),
        "lion": _equal(
            _WITHOUT_DECAY,
            lambda step: step.rate * step.gradient.sign(),
            "entries do not move by the learning rate along the gradient's sign",
        ),
        "muon": _muon,
    }
)
"""Rules by algorithm. Those of other packages are not checked."""
