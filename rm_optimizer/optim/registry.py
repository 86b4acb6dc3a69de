"""Registry of the optimizers: origin, cost, builder, and setups in which each would be another algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName
from rm_optimizer.schema.registry import Registry

Family = Literal["elementwise", "factored", "matrix", "two_pass", "schedule_free", "lr_free"]
TrainingSetup = Literal["fsdp1", "fsdp2", "deepspeed", "decay"]
Builder = Callable[..., Optimizer]


@dataclass(frozen=True)
class OptimizerInfo:
    """One entry of the registry."""

    name: str
    options: type[OptimizerConfig]
    """Dataclass of its options."""
    build: Builder
    """Builder, called with a partition, the optimizer's options and the run's number of steps or None."""
    family: Family = "elementwise"
    state_bytes_per_param: float = math.nan
    """Bytes of complete optimizer state for each entry of a square float32 hidden matrix; NaN if unknown."""
    refuses: Mapping[TrainingSetup, str] = field(default_factory=dict)
    """Setups in which it would be another algorithm than its name says, each with the reason."""
    extra: str | None = None
    """Extra of rm-optimizer that installs it; None for built-in ones."""
    passes_per_step: int = 1
    """Forward and backward passes over a macro-batch in one step."""


def _without_shards(reason: str) -> dict[TrainingSetup, str]:
    return {"fsdp1": reason.format("FSDP1"), "deepspeed": reason.format("DeepSpeed")}


FLAT = _without_shards("{} flattens every matrix to one dimension")
GLOBAL = _without_shards("under {} each process would see the norm of its own shard only")
CLIPPED = _without_shards("under {} each process would clip gradients by the norm of its own shard")
WHOLE: dict[TrainingSetup, str] = {"fsdp2": "its package computes on whole tensors only, not on FSDP2's shards"}
BFLOAT16: dict[TrainingSetup, str] = {
    "fsdp2": "its package would sum products of bfloat16 shards, another step than one device takes"
}
AVERAGES: dict[TrainingSetup, str] = {
    "decay": "averaging replaces the decay, and a decaying schedule on top of it trains another algorithm"
}
POPT = "optimizers"
"""Extra that installs pytorch-optimizer."""
OPTIMIZERS: Registry[OptimizerInfo] = Registry("optimizer")


def built_in(options: type[OptimizerConfig], family: Family, state_bytes: float, **facts: Any) -> Callable[..., Any]:
    """Decorator that registers a builder of this package under the name in its options; the tests check its contract.

    Args:
        options: dataclass of its options.
        family: kind of its update rule.
        state_bytes: bytes of its state for each entry of a hidden matrix.
        facts: further fields of `OptimizerInfo`.
    """

    def register(build: Builder) -> Builder:
        info = OptimizerInfo(options.name, options, build, family, state_bytes, **facts)
        OPTIMIZERS.add(info.name, info, build)
        return build

    return register


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
    names = [head_names] if isinstance(head_names, str) else head_names
    optimizer = OPTIMIZERS[config.name].build(partition(model, head_names=names), config, num_steps)
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
    refuses = OPTIMIZERS[config.name].refuses
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
