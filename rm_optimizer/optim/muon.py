"""Muon, and an optimizer composed of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.param_groups import ParamPartition, Role
from rm_optimizer.optim.registry import FLAT, built_in
from rm_optimizer.schema.optimizers import MuonConfig, MuonScaling


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


MUON_ROLES = (Role.hidden, Role.lora)
ADAMW_ROLES = tuple(role for role in Role if role not in MUON_ROLES)


@built_in(MuonConfig, "matrix", 4, refuses=FLAT)
def build_muon(params: ParamPartition, config: MuonConfig, num_steps: int | None) -> Optimizer:
    """Muon (Jordan et al., 2024) on hidden matrices and LoRA factors, AdamW on everything else.

    The rules are `torch.optim.Muon` and `torch.optim.AdamW`. With scaling `match_rms_adamw` a matrix moves by
    ``0.2 sqrt(max(rows, columns)) lr O``, with ``O`` the orthogonalized momentum (Liu et al., 2025, arXiv 2502.16982).

    Raises:
        ConfigError: if there is no matrix for Muon, it is unknown whether a matrix is hidden, or an option does not
            work as its name says.
    """
    params.require_known_matrices("muon")
    matrices = [item.parameter for item in params.parameters if item.role in MUON_ROLES]
    if not matrices:
        raise ConfigError(
            "optimizer=muon found no trainable hidden matrix, so it would be AdamW; choose optimizer=adamw"
        )
    if config.scaling is MuonScaling.original and any(item.role is Role.lora for item in params.parameters):
        raise ConfigError(
            "optimizer.scaling must be match_rms_adamw with LoRA, got original, "
            "which moves factor B sqrt(rows / rank) times as far as factor A"
        )
    rule = ShardedMuon if any(isinstance(matrix, DTensor) for matrix in matrices) else torch.optim.Muon
    muon = rule(
        params.groups(config, roles=MUON_ROLES),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.scaling.value,
    )
    rest = params.groups(config, lr=config.adamw_lr, roles=ADAMW_ROLES)
    if not rest:
        return CompositeOptimizer(muon)
    for group in rest:
        group["algorithm"] = "adamw"
    betas = (config.beta1, config.beta2)
    return CompositeOptimizer(muon, torch.optim.AdamW(rest, lr=config.adamw_lr, betas=betas, eps=config.eps))


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for matrices sharded by FSDP2, which are gathered, orthogonalized whole and split again.

    `torch.optim.Muon` runs on shards too, but it then sums products of bfloat16 parts over ranks. For a gradient of low
    rank that step differs from the step on one device by up to 0.3 of its length. Momentum is stored in shards; only
    one matrix at a time is whole.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        loss = loss_of(closure)
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
        """Step one matrix with Muon; its gradient and momentum are whole on every rank during the step."""
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
