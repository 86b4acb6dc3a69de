"""Combinations that would silently train something else than they say are refused before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.registry import TrainingSetup, optimizer_info
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName

SHARDED_STRATEGY = "fsdp2"
"""What `hardware.strategy` calls FSDP2."""

OTHERS = "use hardware=fsdp, which is FSDP2, or hardware=ddp"
HINTS: dict[TrainingSetup, str] = {
    "fsdp1": OTHERS,
    "fsdp2": "use hardware=ddp",
    "deepspeed": OTHERS,
    "decay": "add schedule=constant",
}


def check_compatible(config: OptimizerConfig, hardware: HardwareConfig, schedule: ScheduleConfig) -> None:
    """Refuse an optimizer where it would be another algorithm under the same name.

    Raises:
        ConfigError: naming the combination and the reason.
    """
    refuses = optimizer_info(config.name).refuses
    for setup, option in _setups(hardware, schedule):
        if setup in refuses:
            raise ConfigError(f"optimizer={config.name} does not go with {option}: {refuses[setup]}; {HINTS[setup]}")


def _setups(hardware: HardwareConfig, schedule: ScheduleConfig) -> Iterator[tuple[TrainingSetup, str]]:
    """Setups of the run that an optimizer may refuse, each with the option."""
    kinds: dict[str, TrainingSetup] = {SHARDED_STRATEGY: "fsdp2", "fsdp": "fsdp1", "deepspeed": "deepspeed"}
    kind = next((kind for start, kind in kinds.items() if hardware.strategy.startswith(start)), None)
    if kind is not None:
        yield kind, f"hardware.strategy={hardware.strategy}"
    if schedule.name is not ScheduleName.constant:
        yield "decay", f"schedule.name={schedule.name.value}"
