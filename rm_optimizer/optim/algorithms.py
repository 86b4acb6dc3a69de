"""Optimizers of this package: Lion, SAM, Schedule-Free AdamW, and any other one on weights in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.muon import CompositeOptimizer, loss_of
from rm_optimizer.records.randomness import random_state, set_random_state


class Lion(Optimizer):
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, Program 1).

    ``p <- p - lr wd p;  p <- p - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g``

    Args:
        params: parameters or groups of them.
        lr: learning rate; every coordinate moves by it.
        beta1: weight of the momentum in the step, in [0, 1).
        beta2: decay of the momentum, in [0, 1).
        weight_decay: decoupled decay.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, beta1: float, beta2: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(m.lerp(p.grad, 1 - group["beta1"]).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["beta2"])
        return loss


class SAM(CompositeOptimizer):
    """SAM (Foret et al., 2021, arXiv 2010.01412, Eq. 2-4) and ASAM (Kwon et al., 2021, arXiv 2102.11600).

    ``step(closure)`` calls the closure twice. The first call computes ``g`` at ``w``, and the weights move to ``w + e``
    with ``e = rho g / ||g||`` (ASAM: ``e = rho w^2 g / || |w| g ||``). The second call computes the gradient there. The
    weights then return to ``w`` bit for bit, and the base optimizer steps with the second gradient.

    The closure must zero the gradients, compute them for the *whole* macro-batch and return the loss. It may accumulate
    and clip, since both passes use the same pairs and ``e`` does not depend on the length of ``g``. The random
    generators are set back before the second call. So both passes use the same dropout, and the generators end where
    one pass would have left them. Under FSDP1 each process would compute the norm of its shard only, so
    `check_compatible` refuses it.

    Args:
        base: the optimizer that takes the step.
        rho: radius of the ascent step.
        adaptive: ASAM's scale-free radius.
    """

    def __init__(self, base: Optimizer, *, rho: float, adaptive: bool = False) -> None:
        super().__init__(base)
        self.rho = rho
        self.adaptive = adaptive

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Compute two passes, take one step, and return the loss of the first pass, which is at ``w``.

        Raises:
            ValueError: without a closure.
        """
        if closure is None:
            raise ValueError("SAM needs step(closure): it computes the gradients twice in each step")
        before = random_state()
        with torch.enable_grad():
            loss = closure()
        weights = self._ascend()
        set_random_state(before)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, w in weights:
                p.copy_(w)
        super().step()
        return loss

    @torch.no_grad()
    def _ascend(self) -> list[tuple[Tensor, Tensor]]:
        """Move the weights to ``w + e``, and return each parameter with a copy of its ``w``."""
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        weights = [(p, p.detach().clone()) for p in moved]
        scaled = [p.grad * p.abs() if self.adaptive else p.grad for p in moved]
        scale = self.rho / (torch.nn.utils.get_total_norm(scaled) + 1e-12)
        for p, g in zip(moved, scaled, strict=True):
            p.add_((g * p.abs() if self.adaptive else g) * scale.to(p.device))
        return weights


class ScheduleFreeAdamW(Optimizer):
    """Schedule-Free AdamW (Defazio et al., 2024, "The road less scheduled", arXiv 2405.15682, Algorithm 1).

    It has three points: ``z`` takes the steps, ``x`` is the average of the ``z``, and gradients are computed at
    ``y = (1 - beta1) z + beta1 x``.
    ``v <- beta2 v + (1 - beta2) g^2;  d = g / (sqrt(v / (1 - beta2^t)) + eps) + wd y;  z <- z - lr d;
    x <- (1 - c) x + c z`` with ``c = w_t / sum(w)`` and ``w_t = max(lr)^weight_lr_power``.

    Parameters hold ``y`` during training and ``x`` after `eval`. Evaluate, export and measure ``x``. Updates equal
    `schedulefree.AdamWScheduleFree` 1.4's, with two deviations. Gradients are not overwritten. Going to ``x``
    and back restores ``y`` bit for bit from a copy, so that the number of evaluations never changes a run. The copy is
    part of `state_dict`, so that a checkpoint saved after `eval` holds ``x`` as its weights and resumes exactly.

    Args:
        params: parameters or groups of them.
        lr: learning rate, reached by a warm-up and then constant.
        beta1: interpolation between ``z`` and ``x``, in (0, 1).
        beta2: decay of the mean square, in [0, 1).
        eps: term added to the root of the mean square.
        weight_decay: decoupled decay, computed from ``y``.
        weight_lr_power: exponent of the largest learning rate so far in ``w_t``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        counters = {"step": 0, "weight_sum": 0.0, "lr_max": 0.0, "train_mode": False}
        super().__init__(params, options | counters | {"weight_lr_power": weight_lr_power})

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averages ``x`` into the parameters."""
        for group in self._groups_in(train_mode=True):
            for p in self._started(group):
                self.state[p]["y"] = p.detach().clone()
                p.lerp_(self.state[p]["z"], 1 - 1 / group["beta1"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Put the points ``y``, where gradients are computed, into the parameters."""
        for group in self._groups_in(train_mode=False):
            for p in self._started(group):
                p.copy_(self.state[p].pop("y"))
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            RuntimeError: in evaluation mode, since the parameters then do not hold ``y``.
        """
        if any(self._groups_in(train_mode=False)):
            raise RuntimeError("ScheduleFreeAdamW.step in evaluation mode; call set_train_mode(optimizer, True) before")
        loss = loss_of(closure)
        for group in self.param_groups:
            group["step"] += 1
            group["lr_max"] = max(group["lr"], group["lr_max"])
            weight = group["lr_max"] ** group["weight_lr_power"]
            group["weight_sum"] += weight
            average_weight = float(weight / group["weight_sum"]) if group["weight_sum"] else 0.0  # c of the new z
            for p in (p for p in group["params"] if p.grad is not None):
                self._update(p, p.grad, group, average_weight)
        return loss

    def _groups_in(self, *, train_mode: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["train_mode"] is train_mode]

    def _started(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if "z" in self.state[p]]

    def _update(self, y: Tensor, g: Tensor, group: dict[str, Any], average_weight: float) -> None:
        state, lr, beta1, beta2 = self.state[y], group["lr"], group["beta1"], group["beta2"]
        if not state:
            state["z"] = y.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(y)
        z, v = state["z"], state["exp_avg_sq"]
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        d = g / v.div(1 - beta2 ** group["step"]).sqrt_().add_(group["eps"])
        if group["weight_decay"]:
            d.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, average_weight)
        y.add_(d, alpha=lr * (beta1 * (1 - average_weight) - 1))
        z.sub_(d, alpha=lr)


def round_at_random(values: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """Float32 numbers as one of their two neighbors in bfloat16, at random, so that their mean is the number.

    The upper neighbor's probability is the distance from the lower one in units of their difference (stochastic
    rounding; Gupta et al., 2015, arXiv 1502.02551, Eq. 1). Draws come from the device's own generator.
    """
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device)
    kept = (values.view(torch.int32) + noise) & -(1 << 16)  # a carry out of the lost bits is the upper neighbor
    return torch.where(values.isnan(), values, kept.view(torch.float32)).bfloat16()  # a carry may end a NaN


class StochasticRounding(Optimizer):
    """An optimizer of weights in bfloat16, which steps each in float32 and rounds it at random.

    Gradients and state are float32, and a step drops the gradients. An update below the resolution of a weight moves it
    in a share of the steps, so that the mean movement is right. Rounding to the nearest number would lose it. Weights
    are stepped one at a time, so that a single one is held in float32. The base's step of a weight must not depend on
    the others. The weights' `grad_dtype` stays float32.

    Args:
        base: the optimizer that takes the steps.
    """

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self._share()
        for weight in half_weights(self):
            weight.grad_dtype = torch.float32

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state and the groups."""
        stored = [(weight, weight.data) for weight in half_weights(self)]
        for weight, data in stored:  # the state is cast to their types
            weight.data = data.new_empty(0, dtype=torch.float32)
        try:
            self.base.load_state_dict(state_dict)
        finally:
            for weight, data in stored:
                weight.data = data
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        loss = loss_of(closure)
        for part in getattr(self.base, "parts", (self.base,)):
            groups = part.param_groups
            try:
                for group in groups:
                    after = group
                    for weight in (each for each in group["params"] if each.grad is not None):
                        after = {**group, "params": [weight]}  # counters of the group as they were before the step
                        part.param_groups = [after]
                        _step_alone(part, weight)
                    group |= {**after, "params": group["params"]}
            finally:
                part.param_groups = groups
        return loss


def half_weights(optimizer: Optimizer) -> list[Tensor]:
    """Weights of an optimizer that are stored in bfloat16."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.dtype == torch.bfloat16]


def _step_alone(optimizer: Optimizer, weight: Tensor) -> None:
    """Step the only weight of an optimizer, in float32 or better."""
    stored = weight.data
    weight.data = stored.to(torch.promote_types(stored.dtype, torch.float32))
    try:
        optimizer.step()
        if stored.dtype == torch.bfloat16:
            stored.copy_(round_at_random(weight.data))
            weight.grad = None  # torch moves no weight to another device with a gradient of another type
    finally:
        weight.data = stored


def set_train_mode(optimizer: Optimizer, training: bool) -> None:
    """Put training or evaluation weights into the parameters; does nothing for optimizers with one kind of weights.

    Call it with True before the first step and with False before evaluation, checkpoints and export.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if switch is not None:
        switch()


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Context with the evaluation weights in the parameters; its end restores the earlier weights."""
    was_training = all(group.get("train_mode", True) for group in optimizer.param_groups)
    set_train_mode(optimizer, False)
    try:
        yield
    finally:
        set_train_mode(optimizer, was_training)
