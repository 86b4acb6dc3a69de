"""`rm-opt info` and `rm-opt params`: what is installed, and an optimizer's parameter groups for a model."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.interfaces.launch import names_model, quoted
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.schema import config_root
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS

if TYPE_CHECKING:
    from rm_optimizer.optim.param_groups import GroupRow


def info() -> None:
    """Print versions, devices, presets and optimizers."""
    _section("versions", {**versions(), "commit": commit() or "installed package"})
    _section("machine", {**machine(), **devices()})
    print(f"presets in {config_root()}")
    for group, names in presets().items():
        print(f"  {group:<14}{', '.join(names)}")
    print(f"optimizers\n  {', '.join(sorted(OPTIMIZER_OPTIONS))}")


def devices() -> dict[str, str]:
    """Description of each accelerator by its name in torch."""
    if version("torch").endswith("+cpu"):
        return {"accelerator": "none (cpu)"}
    import torch  # takes a second

    from rm_optimizer.records.accelerator import accelerators

    found = {device: torch.get_device_module(device).get_device_properties(device) for device in accelerators()}
    named = {str(device): f"{item.name}, {item.total_memory / 2**30:.0f} GiB" for device, item in found.items()}
    return named or {"accelerator": "none (cpu)"}


def presets() -> dict[str, list[str]]:
    """Preset names of each group, read from the package's folder of presets."""
    groups = sorted(folder for folder in Path(config_root()).iterdir() if folder.is_dir())
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}


def _section(title: str, rows: dict[str, str]) -> None:
    print(title)
    for name, value in rows.items():
        print(f"  {name:<20}{value}")


def params(
    model: Annotated[str, Argument(help="Model preset, folder or hub id.")],
    optimizer: Annotated[str, Option("--optimizer", "-o", help="Optimizer preset.")] = "adamw",
) -> None:
    """Print an optimizer's parameter groups for a model. Columns: algorithm, learning rate, weight decay and sizes."""
    from rich.console import Console
    from rich.table import Table

    table = Table("role", "algorithm", title=f"{optimizer} on {model}")
    for column in ("lr", "weight decay", "tensors", "parameters"):
        table.add_column(column, justify="right")
    table.add_column("first name")
    for row in groups_of(model, optimizer):
        numbers = (f"{row.lr:.3g}", f"{row.weight_decay:.3g}", str(row.num_tensors), f"{row.num_parameters:,}")
        table.add_row(row.role, row.algorithm, *numbers, row.names[0])
    Console().print(table)


def groups_of(model: str, optimizer: str) -> tuple[GroupRow, ...]:
    """Rows of the table, one for each parameter group."""
    from rm_optimizer.core.tokens.splits import load_training_data
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.optim import build_optimizer
    from rm_optimizer.optim.param_groups import describe_groups
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.preparation import build_model

    chosen = f"model.path={quoted(model)}" if names_model(model) else f"model={quoted(model)}"
    config = checked([chosen, f"optimizer={quoted(optimizer)}"], TrainConfig, writable=False)
    built = build_model(config.model, load_training_data(config.data).train, config.seed)
    return describe_groups(build_optimizer(built, config.optimizer, head_names=built.head_parameter_names()))
