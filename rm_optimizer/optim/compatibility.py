"""Combinations that would silently train something else than they say are refused before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.registry import TrainingSetup, optimizer_info
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName

SHARDED_STRATEGY = "fsdp2"
"""What `hardware.strategy` calls FSDP2."""

OPTIONS: dict[TrainingSetup, str] = {
    "fsdp1": "hardware.strategy",
    "fsdp2": "hardware.strategy",
    "deepspeed": "hardware.strategy",
    "decay": "schedule.name",
}
HINTS: dict[TrainingSetup, str] = {
    "fsdp1": "; use hardware=fsdp, which is FSDP2, or hardware=ddp",
    "fsdp2": "; use hardware=ddp",
    "deepspeed": "; use hardware=fsdp, which is FSDP2, or hardware=ddp",
    "decay": "; add schedule=constant",
}


def check_compatible(config: OptimizerConfig, hardware: HardwareConfig, schedule: ScheduleConfig) -> None:
    """Refuse an optimizer where it would be another algorithm under the same name.

    Raises:
        ConfigError: naming the combination and the reason.
    """
    refuses = optimizer_info(config.name).refuses
    for setup, value in _setups(hardware, schedule):
        if setup in refuses:
            option = f"{OPTIONS[setup]}={value}"
            raise ConfigError(f"optimizer={config.name} does not go with {option}: {refuses[setup]}{HINTS[setup]}")


def _setups(hardware: HardwareConfig, schedule: ScheduleConfig) -> Iterator[tuple[TrainingSetup, str]]:
    """Setups of the run that an optimizer may refuse, each with the option's value."""
    if hardware.strategy == SHARDED_STRATEGY:
        yield "fsdp2", hardware.strategy
    elif hardware.strategy.startswith("fsdp"):
        yield "fsdp1", hardware.strategy
    if hardware.strategy.startswith("deepspeed"):
        yield "deepspeed", hardware.strategy
    if schedule.name is not ScheduleName.constant:
        yield "decay", schedule.name.value
