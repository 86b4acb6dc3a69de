"""Several optimizers in one object, with one schedule, one clipping, one checkpoint entry and one count of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Loss of an optimizer's closure, which computes the gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CompositeOptimizer(Optimizer):
    """Optimizers of disjoint parameters that step together.

    The parts keep their own update rules and share this object's group dictionaries and state. So a learning-rate
    schedule of this object acts on all parts, and `state_dict` holds everything once.

    Args:
        parts: optimizers whose groups are complete; groups cannot be added later.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:stop]
            part.state = self.state
            start = stop

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group, since no part would step it.

        Raises:
            ValueError: always, once the optimizer is built.
        """
        if self.parts:
            raise ValueError("the groups of a CompositeOptimizer are fixed when it is built; build a new one")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state and groups of every part."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part once, after one evaluation of the closure if there is one."""
        loss = loss_of(closure)
        for part in self.parts:
            part.step()
        return loss
