"""Every trainable parameter in exactly one optimizer group, by role and depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.optimizers import OptimizerConfig


class Role(StrEnum):
    """Role of a parameter in its model."""

    hidden = "hidden"
    """Weight of a linear layer inside the backbone."""
    lora = "lora"
    """LoRA factor A or B."""
    new = "new"
    """Matrix between backbone and reward head (pooler, classifier.dense, head.dense), usually freshly initialized."""
    other = "other"
    """Weight of stacked experts, routers, convolutions, or a layer of an unknown type."""
    embedding = "embedding"
    """Table of vectors by token, position or distance."""
    norm = "norm"
    """Scale or shift of a normalization."""
    bias = "bias"
    """Bias or other vector."""
    head = "head"
    """Weight or bias of the reward head."""


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
GATES = ("gate", "router")
"""Names of the linear layers that choose experts."""
STATES = ("A_log", "D")
"""Names of the parameters of a state-space layer that hold a vector for each channel; its authors do not decay them."""


def role_of(name: str, parameter: nn.Parameter, module: nn.Module, *, backbone: str) -> Role | None:
    """The role of a parameter outside the reward head; None for a matrix in a layer of an unknown type.

    In such a layer a vector counts as a bias, and stacked matrices count as `other`.

    Args:
        name: the parameter's full name.
        parameter: the parameter itself.
        module: the module that holds it.
        backbone: prefix of the names inside the backbone.

    Raises:
        ConfigError: for a linear layer with one output after the backbone, which is an undeclared reward head.
    """
    path, kind = name.split("."), type(module).__name__
    if "lora_A" in path or "lora_B" in path:
        return Role.lora
    is_matrix = path[-1] == "weight" and parameter.ndim == 2
    if isinstance(module, nn.Embedding) or (kind.endswith("Embedding") and is_matrix):
        return Role.embedding
    if "lora_embedding_A" in path or "lora_embedding_B" in path:
        return Role.embedding
    if isinstance(module, NORMS) or kind.endswith("Norm"):
        return Role.norm
    if path[-1].endswith("bias") or path[-1] in STATES or "lora_magnitude_vector" in path:
        return Role.bias
    if isinstance(module, _ConvNd) or kind.endswith(("Experts", "Router")):
        return Role.other
    is_linear = is_matrix and (kind.endswith("Linear") or isinstance(module, nn.Linear))
    if is_linear or (path[-1] == "weight" and kind == "Conv1D"):
        inside = name.startswith(backbone)
        if parameter.shape[0] == 1 and not (inside and backbone):
            raise ConfigError(f"{name} has one output, so it is a reward head and must be among the head names")
        if parameter.shape[0] == 1 or path[-2] in GATES:
            return Role.other
        return Role.hidden if inside and not any("pooler" in part for part in path) else Role.new
    if sum(size > 1 for size in parameter.shape) < 2:  # a vector
        return Role.norm if "Norm" in kind else Role.bias
    return None if parameter.ndim == 2 else Role.other


def backbone_prefix(model: nn.Module) -> str:
    """Prefix of the names of the backbone's parameters.

    Transformers models name the child that is the pretrained backbone. Any other model is a backbone as a whole, with
    an empty prefix.
    """
    for name, module in model.named_modules():
        child = getattr(type(module), "base_model_prefix", "")
        if child and child in dict(module.named_children()):
            return f"{name}.{child}." if name else f"{child}."
    return ""


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
    names = {name for name, _ in model.named_parameters()}  # as they are sorted below: the first of tied names
    if absent := sorted(set(head_names) - names):
        raise ConfigError(f"head names must be parameters of the model, got {', '.join(absent)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("nothing is trainable: every parameter of the model is frozen")
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    trained = {name for name, module in lists.items() if any(p.requires_grad for p in module.parameters())}
    block_lists = trained or set(lists)  # frozen blocks are not layers, unless all are
    backbone, num_layers = backbone_prefix(model), 0
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


def _block(name: str, block_lists: Collection[str]) -> int | None:
    """Number, from 1, of the block that holds a parameter, in the outermost module list; None outside the blocks."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[:depth]) in block_lists:
            return int(part) + 1
    return None
