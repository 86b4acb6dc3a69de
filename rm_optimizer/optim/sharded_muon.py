"""Muon where matrices are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for matrices sharded by FSDP2: each is gathered, orthogonalized whole, and split again.

    Muon itself runs on shards too, but then sums products of bfloat16 parts over ranks: for a gradient of low rank the
    step differs from one device's by up to 0.3 of its length. Momentum is stored in shards; one matrix at a time is
    whole.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_one(group, parameter)
        finally:
            self.param_groups = groups
        return loss

    def _step_one(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Let Muon step one matrix whose gradient and momentum are whole on every rank meanwhile."""
        sharded, state = parameter.grad, self.state[parameter]
        assert isinstance(parameter, DTensor)
        assert isinstance(sharded, DTensor)
        if "momentum_buffer" in state:
            state["momentum_buffer"] = _whole(state["momentum_buffer"])
        parameter.grad = _whole(sharded)
        self.param_groups = [{**group, "params": [parameter]}]
        super().step()  # type: ignore[no-untyped-call]
        parameter.grad = sharded
        buffer = state["momentum_buffer"]
        state["momentum_buffer"] = buffer.redistribute(placements=parameter.placements)


def _whole(value: DTensor) -> DTensor:
    """The same values, whole on every rank."""
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
