"""Registry of the optimizers: origin, cost, setups in which each would be another algorithm, and builder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.optim import extra, standard
from rm_optimizer.optim.muon import build_muon
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.schema.optimizers import OptimizerConfig

Family = Literal["elementwise", "factored", "matrix", "two_pass", "schedule_free", "lr_free"]
TrainingSetup = Literal["fsdp1", "fsdp2", "deepspeed", "decay"]


@dataclass(frozen=True)
class OptimizerInfo:
    """One entry of the registry."""

    name: str
    extra: str | None
    """Extra of rm-optimizer that installs it; None for built-in ones."""
    family: Family
    state_bytes_per_param: float
    """Bytes of complete optimizer state for each entry of a square float32 hidden matrix."""
    build: Callable[..., Optimizer]
    """Builder, called with a partition, the optimizer's configuration and the run's number of steps or None."""
    refuses: Mapping[TrainingSetup, str]
    """Setups in which it would be another algorithm than its name says, each with the reason."""
    passes_per_step: int = 1
    """Forward and backward passes over a macro-batch in one step."""


FLAT: Mapping[TrainingSetup, str] = {
    "fsdp1": "FSDP1 flattens every matrix to one dimension",
    "deepspeed": "DeepSpeed flattens every matrix to one dimension",
}
GLOBAL: Mapping[TrainingSetup, str] = {
    "fsdp1": "under FSDP1 each process would see the norm of its own shard only",
    "deepspeed": "under DeepSpeed each process would see the norm of its own shard only",
}
CLIPPED: Mapping[TrainingSetup, str] = {
    "fsdp1": "under FSDP1 each process would clip gradients by the norm of its own shard",
    "deepspeed": "under DeepSpeed each process would clip gradients by the norm of its own shard",
}
WHOLE: Mapping[TrainingSetup, str] = {"fsdp2": "its package computes on whole tensors only, not on FSDP2's shards"}
BFLOAT16: Mapping[TrainingSetup, str] = {
    "fsdp2": "its package would sum products of bfloat16 shards, another step than one device takes"
}
AVERAGES: Mapping[TrainingSetup, str] = {
    "decay": "averaging replaces the decay, and a decaying schedule on top of it trains another algorithm"
}
POPT = "optimizers"
"""Extra that installs pytorch-optimizer."""


OPTIMIZERS: Mapping[str, OptimizerInfo] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            OptimizerInfo("adam", None, "elementwise", 8, standard.build_adam, CLIPPED),
            OptimizerInfo("adamw", None, "elementwise", 8, standard.build_adamw, CLIPPED),
            OptimizerInfo("sgd", None, "elementwise", 4, standard.build_sgd, CLIPPED),
            OptimizerInfo("muon", None, "matrix", 4, build_muon, FLAT),
            OptimizerInfo("lion", None, "elementwise", 4, standard.build_lion, CLIPPED),
            OptimizerInfo("adafactor", None, "factored", 0, standard.build_adafactor, {**FLAT, **WHOLE}),
            OptimizerInfo("sam", None, "two_pass", 8, standard.build_sam, GLOBAL, passes_per_step=2),
            OptimizerInfo(
                "schedulefree",
                None,
                "schedule_free",
                8,
                standard.build_schedule_free,
                {**AVERAGES, **CLIPPED},
            ),
            OptimizerInfo("soap", POPT, "matrix", 24, extra.build_soap, {**FLAT, **WHOLE}),
            OptimizerInfo("ademamix", POPT, "elementwise", 12, extra.build_ademamix, CLIPPED),
            OptimizerInfo("prodigy", POPT, "lr_free", 16, extra.build_prodigy, {**GLOBAL, **WHOLE}),
            OptimizerInfo("mars", POPT, "elementwise", 12, extra.build_mars, {**FLAT, **WHOLE}),
            OptimizerInfo("scion", POPT, "matrix", 4, extra.build_scion, {**FLAT, **BFLOAT16}),
            OptimizerInfo("shampoo", POPT, "matrix", 28, extra.build_shampoo, {**FLAT, **WHOLE}),
        )
    }
)


def optimizer_info(name: str) -> OptimizerInfo:
    """The registry's entry for an optimizer.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(did_you_mean("optimizer", name, OPTIMIZERS))
    return OPTIMIZERS[name]


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, head_names: Collection[str], num_steps: int | None = None
) -> Optimizer:
    """The optimizer of a model's trainable parameters, each in exactly one group.

    In addition to torch's entries, groups have `role` and `algorithm`, which `describe_groups` returns as a table.

    Args:
        model: the model before any distributed wrapper.
        config: the options of a registered optimizer.
        head_names: full names of the reward head's parameters.
        num_steps: optimizer steps of the whole run; ademamix needs it for the warm-up of its slow momentum.

    Raises:
        ConfigError: if the optimizer is unknown, the role of a parameter that decides its rule is unknown, or an option
            does not work as its name says.
        MissingExtra: if the optimizer's package is not installed.
    """
    info = optimizer_info(config.name)
    params = partition(model, head_names=head_names)
    optimizer = info.build(params, config, num_steps)
    for group in optimizer.param_groups:
        group.setdefault("algorithm", config.name)
    return optimizer
