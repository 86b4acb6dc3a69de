"""Every trainable parameter in exactly one optimizer group, by role and depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.roles import Role, backbone_prefix, role_of
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.optimizers import OptimizerConfig

DECAYED = frozenset({Role.hidden, Role.lora, Role.new, Role.other})
"""Roles with weight decay. Norms, biases and the reward head have none. Embeddings have none either, since decay would
shrink the rows of tokens that no batch contains."""
HEAD_SIDE = frozenset({Role.head, Role.new})
"""Roles whose learning rate `head_lr_factor` multiplies."""


@dataclass(frozen=True)
class RoledParameter:
    """A trainable parameter with its role."""

    name: str
    role: Role
    layer: int | None
    """0 for embeddings and parameters before the blocks, 1 … num_layers in the blocks, None after them."""
    parameter: nn.Parameter


@dataclass(frozen=True)
class ParamPartition:
    """Every trainable parameter of a model exactly once, in the model's order."""

    parameters: tuple[RoledParameter, ...]
    num_layers: int
    unknown: tuple[str, ...] = ()
    """Matrices in layers of an unknown type, each with its shape and that type; they count as `other`."""

    def require_known_matrices(self, optimizer: str) -> None:
        """Refuse an optimizer with a separate rule for hidden matrices if it is unknown which matrices are hidden.

        Raises:
            ConfigError: if there are such matrices, with their names.
        """
        if self.unknown:
            raise ConfigError(
                f"optimizer={optimizer} must know which matrices are hidden layers, and cannot tell for "
                f"{', '.join(self.unknown[:3])}{' …' * (len(self.unknown) > 3)}; choose optimizer=adamw"
            )

    def groups(
        self, config: OptimizerConfig, *, lr: float | None = None, roles: Collection[Role] = tuple(Role)
    ) -> list[dict[str, Any]]:
        """Optimizer groups of the parameters with these roles, one for each role and learning rate.

        The learning rate is ``lr head_lr_factor`` for the roles in `HEAD_SIDE`, ``lr layer_lr_decay^(L + 1 - layer)``
        for layers 1 … L and the parameters before them (layer 0), and ``lr`` after the last layer (Clark et al., 2020).

        Args:
            config: weight decay and learning-rate factors.
            lr: peak learning rate; None means the configuration's.
            roles: roles to include.

        Raises:
            ConfigError: if `layer_lr_decay` is not 1 and the model has no layers.
        """
        decay, peak = config.layer_lr_decay, config.lr if lr is None else lr
        require(decay == 1 or self.num_layers > 0, "optimizer.layer_lr_decay", "be 1 for a model without layers", decay)
        members = defaultdict(list)
        for item in self.parameters:
            if item.role in roles:
                members[item.role, peak * self._lr_factor(item, config)].append((item.name, item.parameter))
        return [
            {"params": params, "lr": rate, "weight_decay": config.weight_decay * (role in DECAYED), "role": role.value}
            for (role, rate), params in members.items()
        ]

    def _lr_factor(self, item: RoledParameter, config: OptimizerConfig) -> float:
        if item.role in HEAD_SIDE:
            return config.head_lr_factor
        return 1.0 if item.layer is None else config.layer_lr_decay ** (self.num_layers + 1 - item.layer)


@dataclass(frozen=True)
class GroupRow:
    """One optimizer group, as a row of a table."""

    role: str
    algorithm: str
    lr: float
    weight_decay: float
    num_tensors: int
    num_parameters: int
    names: tuple[str, ...]


def describe_groups(optimizer: Optimizer) -> tuple[GroupRow, ...]:
    """Parameters and options of a built optimizer, one row for each of its groups."""
    return tuple(
        GroupRow(
            role=group["role"],
            algorithm=group["algorithm"],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            num_tensors=len(group["params"]),
            num_parameters=sum(p.numel() for p in group["params"]),
            names=tuple(group["param_names"]),
        )
        for group in optimizer.param_groups
    )


def partition(model: nn.Module, *, head_names: Collection[str]) -> ParamPartition:
    """Sort a model's trainable parameters by role; tied parameters count once, under their first name.

    Args:
        model: the model before any distributed wrapper.
        head_names: full names of the reward head's parameters.

    Raises:
        ConfigError: if nothing is trainable, a head name is no parameter, or a layer with one output after the
            backbone is not among the head names.
    """
    _require_parameters(model, head_names)
    backbone, block_lists, num_layers = backbone_prefix(model), _block_lists(model), 0
    found: dict[int, RoledParameter] = {}
    unknown = []
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            block = _block(name, block_lists)
            num_layers = max(num_layers, block or 0)
            if not parameter.requires_grad or id(parameter) in found:
                continue
            is_head = name in head_names
            role = Role.head if is_head else role_of(name, parameter, module, backbone=backbone)
            if role is None:
                unknown.append(f"{name} {tuple(parameter.shape)} of {type(module).__name__}")
                role = Role.other
            below_blocks = role is Role.embedding or num_layers == 0
            found[id(parameter)] = RoledParameter(name, role, 0 if below_blocks else block, parameter)
    return ParamPartition(tuple(found.values()), num_layers, tuple(unknown))


def _block_lists(model: nn.Module) -> set[str]:
    """Names of the module lists with a trainable parameter, since frozen blocks are not layers; all if none has one."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    trained = {name for name, module in lists.items() if any(p.requires_grad for p in module.parameters())}
    return trained or set(lists)


def _block(name: str, block_lists: Collection[str]) -> int | None:
    """Number, from 1, of the block that holds a parameter, in the outermost module list; None outside the blocks."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[:depth]) in block_lists:
            return int(part) + 1
    return None


def _require_parameters(model: nn.Module, head_names: Collection[str]) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    absent = sorted(set(head_names) - names)
    if absent:
        raise ConfigError(f"head names must be parameters of the model, got {', '.join(absent)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("nothing is trainable: every parameter of the model is frozen")
