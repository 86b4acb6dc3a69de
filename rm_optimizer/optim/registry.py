"""Registry of the optimizers: origin, cost, builder, and setups in which each would be another algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Optimizer

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.accelerator import accelerators
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName
from rm_optimizer.schema.registry import Registry

Family = Literal["elementwise", "factored", "matrix", "two_pass", "schedule_free", "lr_free"]
TrainingSetup = Literal["fsdp1", "fsdp2", "deepspeed", "decay", "bfloat16"]
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
GLOBAL = _without_shards("under {} each process would see the norm of its shard only")
CLIPPED = _without_shards("under {} each process would clip gradients by the norm of its shard")
WHOLE: dict[TrainingSetup, str] = {"fsdp2": "its package computes on whole tensors only, not on FSDP2's shards"}
BFLOAT16: dict[TrainingSetup, str] = {
    "fsdp2": "its package would sum products of bfloat16 shards, another step than one device takes"
}
AVERAGES: dict[TrainingSetup, str] = {
    "decay": "averaging replaces the decay, and a decaying schedule on top of it trains another algorithm",
    "bfloat16": "the average of its weights would lose most of each step",
}
TOGETHER: dict[TrainingSetup, str] = {"bfloat16": "it steps all weights by one number of all, not each by itself"}
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


SHARDED_STRATEGY = "fsdp2"
"""Value of `hardware.strategy` for FSDP2."""

OTHERS = "use hardware=fsdp, which is FSDP2, or hardware=ddp"
HINTS: dict[TrainingSetup, str] = {
    "fsdp1": OTHERS,
    "fsdp2": "use hardware=ddp",
    "deepspeed": OTHERS,
    "decay": "add schedule=constant",
    "bfloat16": "use model.dtype=float32 hardware.precision=bf16-mixed",
}
HALF_WEIGHTS: tuple[TrainingSetup, str] = ("bfloat16", "model.dtype=bfloat16")
"""Setup in which weights of bfloat16 train, each stepped by itself, and the option that chooses it."""


def check_compatible(
    config: OptimizerConfig, hardware: HardwareConfig, schedule: ScheduleConfig, *, trains_half_weights: bool = False
) -> None:
    """Refuse an optimizer that would be another algorithm in this setup.

    Raises:
        ConfigError: if the combination is refused, with the reason, or moments are to be paged without a GPU.
    """
    kinds: dict[str, TrainingSetup] = {SHARDED_STRATEGY: "fsdp2", "fsdp": "fsdp1", "deepspeed": "deepspeed"}
    kind = next((kind for start, kind in kinds.items() if hardware.strategy.startswith(start)), None)
    setups: list[tuple[TrainingSetup, str]] = [] if kind is None else [(kind, f"hardware.strategy={hardware.strategy}")]
    if schedule.name is not ScheduleName.constant:
        setups.append(("decay", f"schedule.name={schedule.name.value}"))
    if trains_half_weights:
        setups.append(HALF_WEIGHTS)
    if getattr(config, "paged", False) and not accelerators():
        raise ConfigError(
            "optimizer.paged=true moves moments between the memories of a GPU and of the processor, and torch finds no "
            "GPU here; leave it out"
        )
    require_setups(config, setups)


def require_setups(config: OptimizerConfig, setups: Collection[tuple[TrainingSetup, str]]) -> None:
    """Refuse setups, given with the option that chose each, in which an optimizer would be another algorithm."""
    refuses = OPTIMIZERS[config.name].refuses
    for setup, option in setups:
        if setup in refuses:
            raise ConfigError(f"optimizer={config.name} does not go with {option}: {refuses[setup]}; {HINTS[setup]}")
