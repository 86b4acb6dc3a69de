"""`rm-opt params`: an optimizer's parameter groups for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.interfaces.launch import names_model, quoted

if TYPE_CHECKING:
    from rich.table import Table

    from rm_optimizer.optim.param_groups import GroupRow


def params(
    model: Annotated[str, Argument(help="Model preset, folder or hub id.")],
    optimizer: Annotated[str, Option("--optimizer", "-o", help="Optimizer preset.")] = "adamw",
) -> None:
    """Print an optimizer's parameter groups for a model. Columns: algorithm, learning rate, weight decay and sizes."""
    from rich.console import Console

    Console().print(_table(f"{optimizer} on {model}", groups_of(model, optimizer)))


def groups_of(model: str, optimizer: str) -> tuple[GroupRow, ...]:
    """Rows of the table, one for each parameter group."""
    from rm_optimizer.core.tokens.dataset import load_training_data
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.optim import build_optimizer
    from rm_optimizer.optim.param_groups import describe_groups
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.preparation import build_model

    chosen = f"model.path={quoted(model)}" if names_model(model) else f"model={quoted(model)}"
    config = checked([chosen, f"optimizer={quoted(optimizer)}"], TrainConfig, writable=False)
    built = build_model(config.model, load_training_data(config.data).train, config.seed)
    return describe_groups(build_optimizer(built, config.optimizer, head_names=built.head_parameter_names()))


def _table(title: str, rows: tuple[GroupRow, ...]) -> Table:
    from rich.table import Table

    table = Table("role", "algorithm", title=title)
    for column in ("lr", "weight decay", "tensors", "parameters"):
        table.add_column(column, justify="right")
    table.add_column("first name")
    for row in rows:
        numbers = (f"{row.lr:.3g}", f"{row.weight_decay:.3g}", str(row.num_tensors), f"{row.num_parameters:,}")
        table.add_row(row.role, row.algorithm, *numbers, row.names[0])
    return table
