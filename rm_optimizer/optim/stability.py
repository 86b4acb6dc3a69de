"""Edge of stability: an optimizer's scaling of the Hessian, and the sharpness above which its steps diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.algorithms import SAM

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Stability:
    """Stability of an optimizer's next step on a quadratic with Hessian `H`.

    With `S` the diagonal matrix of `scales`, the largest eigenvalue of `S H S` decides. If it exceeds `limit`, steps
    along its eigenvector grow (Cohen et al., 2021, arXiv 2103.00065; for Adam, 2022, arXiv 2207.14484).

    Args:
        limit: largest stable eigenvalue at the largest learning rate of the groups, without regard to weight decay. It
            is `2 / lr` for gradient descent, `2 (1 + beta) / lr` with momentum, `2 (1 + beta) / ((1 + 2 beta) lr)` with
            Nesterov's momentum, and `2 (1 + beta1) / ((1 - beta1) lr)` for Adam, which is `38 / lr` at 0.9. None if the
            learning rate is 0, or no limit is known, as for SAM, whose gradient belongs to another point.
        scales: entries of `S` by parameter, `sqrt(lr_i / (max(lr) P_i))` with the optimizer's preconditioner `P`. The
            rates are left out if all are 0. An entry is 0 where a second moment is 0, since such a weight has not had a
            gradient. None if `S` is the identity.
    """

    limit: float | None
    scales: Mapping[Tensor, Tensor] | None


def stability_of(optimizer: Optimizer) -> Stability:
    """Scale and limit of an optimizer in its present state.

    Adam, AdamW, SAM with either, schedule-free AdamW, AdEMAMix, MARS, Prodigy and Adafactor have a second moment for
    each weight and precondition with it. Lion, Muon, Scion, Shampoo and SOAP have none, so that `S` is the identity. It
    is the identity before the first step too.
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
    """`sqrt(v / (1 - beta2^t)) + eps`, as in `_adam` but without the bias correction of a momentum."""
    return _root(state["exp_avg_sq"] / (1 - group["beta2"] ** group["step"]), group["eps"])


def _prodigy(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """Result of `_adam` with second moments in units of the squared distance `d`, and with steps `d` times as long."""
    distance = float(group["d"])
    moments = {"exp_avg_sq": state["exp_avg_sq"] / distance**2}
    return _adam(moments, group, parameter).div(distance)


def _adafactor(state: Group, group: Group, parameter: Tensor) -> Tensor:
    """Root of the factored second moment, divided by the root mean square of the weights, which scales the step."""
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
