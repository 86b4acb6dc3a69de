"""Role of each parameter in its model, by module type and name.

The number of dimensions does not decide it: embeddings and reward heads are matrices too, and FSDP1 flattens every
parameter to one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from rm_optimizer.errors import ConfigError


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
    if _is_table(path, parameter, module):
        return Role.embedding
    if isinstance(module, NORMS) or kind.endswith("Norm"):
        return Role.norm
    if path[-1].endswith("bias") or path[-1] in STATES or "lora_magnitude_vector" in path:
        return Role.bias
    if isinstance(module, _ConvNd) or kind.endswith(("Experts", "Router")):
        return Role.other
    if path[-1] == "weight" and parameter.ndim == 2 and (kind.endswith("Linear") or isinstance(module, nn.Linear)):
        return _role_of_linear(name, parameter, backbone)
    if path[-1] == "weight" and kind == "Conv1D":
        return _role_of_linear(name, parameter, backbone)
    return _role_by_shape(parameter, kind)


def _is_table(path: Sequence[str], parameter: nn.Parameter, module: nn.Module) -> bool:
    if "lora_embedding_A" in path or "lora_embedding_B" in path or isinstance(module, nn.Embedding):
        return True
    return type(module).__name__.endswith("Embedding") and path[-1] == "weight" and parameter.ndim == 2


def _role_of_linear(name: str, parameter: nn.Parameter, backbone: str) -> Role:
    path, inside = name.split("."), name.startswith(backbone)
    if parameter.shape[0] == 1 and not (inside and backbone):
        raise ConfigError(f"{name} has one output, so it is a reward head and must be among the head names")
    if parameter.shape[0] == 1 or path[-2] in GATES:
        return Role.other
    return Role.hidden if inside and not any("pooler" in part for part in path) else Role.new


def _role_by_shape(parameter: nn.Parameter, kind: str) -> Role | None:
    """Role of a parameter by its shape alone."""
    if sum(size > 1 for size in parameter.shape) < 2:
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
