"""`rm-opt`: commands and their groups. A command imports its dependencies when it runs, so that help is immediate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rm_optimizer import __version__
from rm_optimizer.interfaces.commands import compare
from rm_optimizer.interfaces.commands.blame import blame
from rm_optimizer.interfaces.commands.bon import bon
from rm_optimizer.interfaces.commands.data import data_check, data_clean
from rm_optimizer.interfaces.commands.ensemble import ensemble_join, ensemble_train
from rm_optimizer.interfaces.commands.evaluate import doctor, evaluate, leaderboard, report
from rm_optimizer.interfaces.commands.labels import label, label_import, scaling, select
from rm_optimizer.interfaces.commands.look_up import info, params
from rm_optimizer.interfaces.commands.models import export_model, import_model, why
from rm_optimizer.interfaces.commands.readiness import readiness
from rm_optimizer.interfaces.commands.rlhf import rlhf
from rm_optimizer.interfaces.commands.score import score
from rm_optimizer.interfaces.commands.serve import serve
from rm_optimizer.interfaces.commands.train import analyze, estimate, train
from rm_optimizer.interfaces.field_flags import with_field_flags
from rm_optimizer.interfaces.groups import (
    DEFAULT,
    OF_OPTIMIZERS,
    Commands,
    DefaultCommands,
    HydraCommand,
    RootCommands,
)

QUIET: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
HYDRA: dict[str, Any] = {
    "cls": HydraCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
Command = Callable[..., None]
GROUPS: dict[str, list[Command]] = {
    "Train and analyze": [train, analyze, estimate],
    "Evaluate and compare": [evaluate, leaderboard, score, doctor, why, blame, report],
    "Couple to a policy": [readiness, bon, rlhf],
    "Labels": [select, label, label_import, scaling],
    "Import and export": [import_model, export_model],
    "Serve": [serve],
    "Look up": [info, params],
}
"""Commands by heading of `rm-opt --help`; groups such as `rm-opt data` are added below."""
SETTINGS: dict[Command, dict[str, Any]] = {
    **dict.fromkeys((train, analyze, estimate, rlhf, ensemble_train), HYDRA),
    import_model: {"name": "import"},
    export_model: {"name": "export"},
}
"""Settings of the commands that have some."""

app = typer.Typer(cls=RootCommands, help="Train, measure and use Bradley-Terry reward models.", **QUIET)
STUDY = (compare.plan, compare.run, compare.status, compare.retry, compare.report, compare.across)


def _add_group(name: str, panel: str, about: str, members: dict[str, Command], kind: type[Commands] = Commands) -> None:
    """Add a command that holds others."""
    group = typer.Typer(cls=kind, help=about, add_completion=False, **QUIET)
    for member, command in members.items():
        group.command(member, **SETTINGS.get(command, {}))(with_field_flags(command))
    app.add_typer(group, name=name, rich_help_panel=panel)


_add_group("data", "Data", "Check and clean preference data.", {"check": data_check, "clean": data_clean})
_add_group(
    "ensemble",
    "Couple to a policy",
    "Join reward models into an ensemble with uncertainty.",
    {"train": ensemble_train, "join": ensemble_join},
)
_add_group(
    "compare",
    "Evaluate and compare",
    "Compare runs or optimizers, or run a study. Finished runs: `rm-opt compare RUN RUN`. Optimizers: "
    "`rm-opt compare --optimizers A,B`.",
    {each.__name__: each for each in STUDY} | {DEFAULT: compare.compare, OF_OPTIMIZERS: compare.compare_optimizers},
    DefaultCommands,
)
for panel, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=panel, **SETTINGS.get(command, {}))(with_field_flags(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rm-opt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, measure and use Bradley-Terry reward models."""


if __name__ == "__main__":
    app()
