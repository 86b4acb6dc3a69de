"""Edge of stability: the scale in which an optimizer sees the Hessian, and the sharpness at which its steps diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.sam import SAM

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Stability:
    """Stability of an optimizer's next step on a quadratic with Hessian `H`.

    With `S` the diagonal of `scales`, the relevant eigenvalue is the largest of `S H S`: steps along it grow once it
    exceeds `limit` (Cohen et al., 2021, arXiv 2103.00065; for Adam, 2022, arXiv 2207.14484).

    Args:
        limit: `2 / lr` of gradient descent, `2 (1 + beta) / lr` with momentum, `2 (1 + beta) / ((1 + 2 beta) lr)` by
            Nesterov, and `2 (1 + beta1) / ((1 - beta1) lr)`, which is `38 / lr` at 0.9, of Adam. Without weight decay,
            at the largest learning rate of the groups. None where no such limit is known, as of SAM, whose gradient is
            that of another point, or the learning rate is 0.
        scales: entries of `S` by parameter, `sqrt(lr_i / (max(lr) P_i))` with the optimizer's preconditioner `P`, and
            without the rates where all are 0. They are 0 where a second moment is 0: such weights have not had a
            gradient. None where `S` is the identity.
    """

    limit: float | None
    scales: Mapping[Tensor, Tensor] | None


def stability_of(optimizer: Optimizer) -> Stability:
    """Scale and limit of an optimizer in its present state.

    Optimizers with a second moment for each weight precondition by it: Adam, AdamW, SAM around them, schedule-free
    AdamW, AdEMAMix, MARS, Prodigy and Adafactor. The others (Lion, Muon, Scion, Shampoo, SOAP) have none, and before
    the first step there is none yet: for them `S` is the identity.
    """
    rule = optimizer.parts[0] if isinstance(optimizer, SAM) else optimizer
    kind, groups = type(rule).__name__, rule.param_groups
    largest = max(group["lr"] for group in groups)
    if kind not in {*_PRECONDITIONERS, "SGD"}:
        return Stability(None, None)
    has_limit = kind in _LIMITS and largest > 0 and rule is optimizer
    limit = _LIMITS[kind](groups[0]) / largest if has_limit else None
    if kind == "SGD" and all(group["lr"] == largest for group in groups):
        return Stability(limit, None)
    with torch.no_grad():
        scales = {p: _scale(rule, group, p, largest) for group in groups for p in group["params"]}
    return Stability(limit, scales if any(scale.any() for scale in scales.values()) else None)


def _scale(rule: Optimizer, group: Group, parameter: Tensor, largest: float) -> Tensor:
    """`sqrt(lr / (largest P))` of a parameter's entries."""
    rate, kind = group["lr"] / largest if largest > 0 else 1.0, type(rule).__name__
    if kind == "SGD":
        return torch.full_like(parameter, math.sqrt(rate))
    state = rule.state.get(parameter)
    if not state:
        return torch.zeros_like(parameter)
    divisor = _PRECONDITIONERS[kind](state, group, parameter)
    scale: Tensor = (rate / divisor).sqrt()
    return scale


def _adam(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """`(1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps)`, infinite where `v` is 0."""
    step = float(state.get("step", group.get("step")))
    beta1, beta2 = group["betas"][:2]
    return _root(state["exp_avg_sq"] / (1 - beta2**step), group["eps"]) * float(1 - beta1**step)


def _schedule_free(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """Scale of `_adam` without a momentum that builds up."""
    return _root(state["exp_avg_sq"] / (1 - group["beta2"] ** group["step"]), group["eps"])


def _prodigy(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """Scale of `_adam` with second moments in units of the squared distance `d`, and steps `d` times as long."""
    distance = float(group["d"])
    moments = {"exp_avg_sq": state["exp_avg_sq"] / distance**2}
    return _adam(moments, group, parameter).div(distance)


def _adafactor(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """Root of the factored second moment, divided by the size of the weights that the step is relative to."""
    if "variance" in state:
        variance = state["variance"]
    else:
        row, column = state["row_var"], state["col_var"]
        mean: Tensor = row.mean(dim=-2, keepdim=True)
        variance = row @ column / mean.clamp(min=torch.finfo(row.dtype).tiny)
    size = float(parameter.norm()) / parameter.numel() ** 0.5
    return _root(variance, 0.0).div(max(group["eps"][1], size))


def _root(variance: Tensor, eps: float) -> Tensor:
    root: Tensor = torch.where(variance > 0, variance.sqrt() + eps, math.inf)
    return root


def _of_sgd(group: Group) -> float:
    beta = group["momentum"]
    return float(2 * (1 + beta) / (1 + 2 * beta if group["nesterov"] else 1))


def _of_adam(group: Group) -> float:
    beta = group["betas"][0]
    return float(2 * (1 + beta) / (1 - beta))


_PRECONDITIONERS: Mapping[str, Callable[[Group, Group, Tensor], Tensor]] = {
    **dict.fromkeys(("Adam", "AdamW", "AdEMAMix", "MARS"), _adam),
    "ScheduleFreeAdamW": _schedule_free,
    "Prodigy": _prodigy,
    "Adafactor": _adafactor,
}
_LIMITS: Mapping[str, Callable[[Group], float]] = {"SGD": _of_sgd, "Adam": _of_adam, "AdamW": _of_adam}
