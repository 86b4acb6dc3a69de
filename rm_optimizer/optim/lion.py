"""Lion: steps along the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.composite import loss_of


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
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        m = state["exp_avg"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(m.lerp(g, 1 - group["beta1"]).sign_(), alpha=-group["lr"])
        m.lerp_(g, 1 - group["beta2"])
