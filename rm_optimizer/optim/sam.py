"""Sharpness-aware minimization: the gradient at a nearby point of higher loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.composite import CompositeOptimizer
from rm_optimizer.records.randomness import random_state, set_random_state


class SAM(CompositeOptimizer):
    """SAM (Foret et al., 2021, arXiv 2010.01412, Eq. 2-4) and ASAM (Kwon et al., 2021, arXiv 2102.11600).

    ``step(closure)`` calls the closure twice. The first call computes ``g`` at ``w``, and the weights move to ``w + e``
    with ``e = rho g / ||g||`` (ASAM: ``e = rho w^2 g / || |w| g ||``). The second call computes the gradient there. The
    weights then return to ``w`` bit for bit, and the base optimizer steps with the second gradient.

    The closure must zero the gradients, compute those of the *whole* macro-batch and return the loss. It may accumulate
    and clip, since both passes use the same pairs and ``e`` does not depend on the length of ``g``. The random
    generators are set back before the second call. So both passes use the same dropout, and the generators end where
    one pass would have left them. Under FSDP1 each process would compute the norm of its own shard only, so
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
