"""Selection of the parameters of a curvature matrix, and their order in one long vector."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.optim.param_groups import partition

TRAINABLE, HEAD, LORA = "trainable", "head", "lora"
"""Names of subsets; anything else is a pattern of parameter names such as `*.layer.0.*`."""
ENTRIES_AT_ONCE = 1 << 17
"""Entries of a long vector that stay in a processor's cache from one operation to the next."""
_WILDCARDS = frozenset("*?[")
_log = logging.getLogger("rm_optimizer")


@dataclass(frozen=True)
class ParameterSubset:
    """Parameters of a model, laid end to end in the model's order.

    Args:
        names: names from `BradleyTerryRM.named_parameters`.
        shapes: shape of each.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def num_parameters(self) -> int:
        """Total number of parameters."""
        return sum(shape.numel() for shape in self.shapes)

    def of(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of these names in a model or a copy of it."""
        found = dict(model.named_parameters())
        return [found[name] for name in self.names]

    def flatten(self, tensors: Sequence[Tensor]) -> Float[Tensor, " parameters"]:
        """Tensors of these shapes as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def unflatten(self, vectors: Float[Tensor, "... parameters"]) -> list[Tensor]:
        """Views of one vector, or of each row of a block, in the parameters' shapes."""
        parts = torch.split(vectors, [shape.numel() for shape in self.shapes], dim=-1)
        return [part.reshape(*vectors.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True)]


def select_parameters(model: BradleyTerryRM, which: str | Sequence[str] = TRAINABLE) -> ParameterSubset:
    """The trainable parameters, the reward head, the LoRA factors, those that match a pattern, or several of these.

    Args:
        model: the reward model.
        which: `trainable`, `head`, `lora`, a shell pattern of names (`*.layer.0.*`), or several of these.

    Raises:
        ConfigError: if nothing is selected, a name in a list is unknown, or the selection is sharded over processes or
            stored in four bits.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    wanted = [which] if isinstance(which, str) else list(which)
    names: set[str] = set()
    for item in wanted:
        if item == TRAINABLE:
            found = [name for name, parameter in named.items() if parameter.requires_grad]
        elif item == HEAD:
            found = [name for name in model.head_parameter_names() if name in named]
        else:
            pattern = "*.lora_*" if item == LORA else item
            found = [name for name in named if fnmatchcase(name, pattern)]
        if not found and not _WILDCARDS.intersection(item):
            raise ConfigError(_nothing(item, list(named)))
        if not found and len(wanted) > 1:
            _log.warning("params: the pattern '%s' matches no parameter and selects nothing", item)
        names.update(found)
    chosen = {name: parameter for name, parameter in named.items() if name in names}
    if not chosen:
        raise ConfigError(_nothing(", ".join(wanted), list(dict(model.named_parameters()))))
    for name, parameter in chosen.items():
        if isinstance(parameter, DTensor) or getattr(parameter, "_is_flat_param", False):
            raise ConfigError(
                f"{name} is sharded over processes (FSDP); load the saved model whole to measure curvature"
            )
    if is_quantized(model.model):
        raise ConfigError(
            "curvature needs weights that can be differentiated twice, got four-bit ones; merge or reload"
        )
    return ParameterSubset(tuple(chosen), tuple(parameter.shape for parameter in chosen.values()))


def parameter_blocks(model: BradleyTerryRM) -> dict[str, ParameterSubset]:
    """Trainable parameters by block: `embeddings`, `layer 1` … and `output` for everything after the layers."""
    head = model.head_parameter_names()
    members: dict[str, list[str]] = defaultdict(list)
    for item in partition(model, head_names=head).parameters:
        block = "output" if item.layer is None else f"layer {item.layer}" if item.layer else "embeddings"
        members[block].append(item.name)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {
        block: ParameterSubset(tuple(names), tuple(shapes[name] for name in names)) for block, names in members.items()
    }


def _nothing(which: str, names: list[str]) -> str:
    if which == TRAINABLE:
        return "the model has no trainable parameters, so its loss has no curvature; unfreeze some or name a subset"
    if which == LORA:
        return (
            "params=lora needs a model with a LoRA adapter, and this one has none or has it merged, as in best/ of a "
            "run; give the run folder, or use params=trainable"
        )
    known = [TRAINABLE, HEAD, LORA, *names]
    nearest = did_you_mean("params", which, known).split("; ", 1)[1].split(" Known")[0]
    return f"params='{which}' matches no parameter; {nearest if nearest.startswith('did') else f'one is {names[0]}'}"


def largest_entry(values: Float[Tensor, "*shape"]) -> float:
    """Largest magnitude of an entry in one pass without a copy; not finite if an entry is not."""
    least, most = torch.aminmax(values)
    return max(-float(least), float(most))
