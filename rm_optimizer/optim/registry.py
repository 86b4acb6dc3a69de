"""Registry of the optimizers: origin, cost, builder, and setups in which each would be another algorithm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.optim import builders
from rm_optimizer.optim.muon import build_muon
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName

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
            OptimizerInfo("adam", None, "elementwise", 8, builders.build_adam, CLIPPED),
            OptimizerInfo("adamw", None, "elementwise", 8, builders.build_adamw, CLIPPED),
            OptimizerInfo("sgd", None, "elementwise", 4, builders.build_sgd, CLIPPED),
            OptimizerInfo("muon", None, "matrix", 4, build_muon, FLAT),
            OptimizerInfo("lion", None, "elementwise", 4, builders.build_lion, CLIPPED),
            OptimizerInfo("adafactor", None, "factored", 0, builders.build_adafactor, {**FLAT, **WHOLE}),
            OptimizerInfo("sam", None, "two_pass", 8, builders.build_sam, GLOBAL, passes_per_step=2),
            OptimizerInfo(
                "schedulefree",
                None,
                "schedule_free",
                8,
                builders.build_schedule_free,
                {**AVERAGES, **CLIPPED},
            ),
            OptimizerInfo("soap", POPT, "matrix", 24, builders.build_soap, {**FLAT, **WHOLE}),
            OptimizerInfo("ademamix", POPT, "elementwise", 12, builders.build_ademamix, CLIPPED),
            OptimizerInfo("prodigy", POPT, "lr_free", 16, builders.build_prodigy, {**GLOBAL, **WHOLE}),
            OptimizerInfo("mars", POPT, "elementwise", 12, builders.build_mars, {**FLAT, **WHOLE}),
            OptimizerInfo("scion", POPT, "matrix", 4, builders.build_scion, {**FLAT, **BFLOAT16}),
            OptimizerInfo("shampoo", POPT, "matrix", 28, builders.build_shampoo, {**FLAT, **WHOLE}),
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
    model: nn.Module, config: OptimizerConfig, *, head_names: str | Collection[str], num_steps: int | None = None
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
    names = [head_names] if isinstance(head_names, str) else head_names
    params = partition(model, head_names=names)
    optimizer = info.build(params, config, num_steps)
    for group in optimizer.param_groups:
        group.setdefault("algorithm", config.name)
    return optimizer


SHARDED_STRATEGY = "fsdp2"
"""Value of `hardware.strategy` for FSDP2."""

OTHERS = "use hardware=fsdp, which is FSDP2, or hardware=ddp"
HINTS: dict[TrainingSetup, str] = {
    "fsdp1": OTHERS,
    "fsdp2": "use hardware=ddp",
    "deepspeed": OTHERS,
    "decay": "add schedule=constant",
}


def check_compatible(config: OptimizerConfig, hardware: HardwareConfig, schedule: ScheduleConfig) -> None:
    """Refuse an optimizer that would be another algorithm in this setup.

    Raises:
        ConfigError: if the combination is refused, with the reason.
    """
    refuses = optimizer_info(config.name).refuses
    for setup, option in _setups(hardware, schedule):
        if setup in refuses:
            raise ConfigError(f"optimizer={config.name} does not go with {option}: {refuses[setup]}; {HINTS[setup]}")


def _setups(hardware: HardwareConfig, schedule: ScheduleConfig) -> Iterator[tuple[TrainingSetup, str]]:
    """Setups of the run that the registry may refuse, each with the option that sets it."""
    kinds: dict[str, TrainingSetup] = {SHARDED_STRATEGY: "fsdp2", "fsdp": "fsdp1", "deepspeed": "deepspeed"}
    kind = next((kind for start, kind in kinds.items() if hardware.strategy.startswith(start)), None)
    if kind is not None:
        yield kind, f"hardware.strategy={hardware.strategy}"
    if schedule.name is not ScheduleName.constant:
        yield "decay", f"schedule.name={schedule.name.value}"
