"""Refusal of combinations of options under which an optimizer would silently be another algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.registry import TrainingSetup, optimizer_info
from rm_optimizer.schema.config import HardwareConfig
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig, ScheduleName

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
