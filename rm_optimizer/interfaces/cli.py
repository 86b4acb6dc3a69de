"""`rm-opt`: commands and their groups. A command imports its dependencies when it runs, so that help is immediate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rm_optimizer import __version__
from rm_optimizer.interfaces.commands.analyze import analyze
from rm_optimizer.interfaces.commands.bon import bon
from rm_optimizer.interfaces.commands.compare import study as compare_study
from rm_optimizer.interfaces.commands.compare.optimizers import compare_optimizers
from rm_optimizer.interfaces.commands.compare.runs import compare
from rm_optimizer.interfaces.commands.data_check import data_check
from rm_optimizer.interfaces.commands.doctor import doctor
from rm_optimizer.interfaces.commands.ensemble import ensemble_join, ensemble_train
from rm_optimizer.interfaces.commands.evaluate import evaluate
from rm_optimizer.interfaces.commands.info import info
from rm_optimizer.interfaces.commands.labels.clean import data_clean
from rm_optimizer.interfaces.commands.labels.label import label
from rm_optimizer.interfaces.commands.labels.scaling import scaling
from rm_optimizer.interfaces.commands.labels.select import label_import, select
from rm_optimizer.interfaces.commands.params import params
from rm_optimizer.interfaces.commands.readiness import readiness
from rm_optimizer.interfaces.commands.report import report
from rm_optimizer.interfaces.commands.rlhf import rlhf
from rm_optimizer.interfaces.commands.score import score
from rm_optimizer.interfaces.commands.serve import serve
from rm_optimizer.interfaces.commands.train import train
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
GROUPS: dict[str, list[tuple[Callable[..., None], dict[str, Any]]]] = {
    "Train and analyze": [(train, HYDRA), (analyze, HYDRA)],
    "Evaluate and compare": [(evaluate, {}), (score, {}), (doctor, {}), (report, {})],
    "Couple to a policy": [(readiness, {}), (bon, {}), (rlhf, HYDRA)],
    "Labels": [(select, {}), (label, {}), (label_import, {}), (scaling, {})],
    "Serve": [(serve, {})],
    "Look up": [(info, {}), (params, {})],
}
"""Commands with their settings, by heading of `rm-opt --help`; groups such as `rm-opt data` are added below."""

app = typer.Typer(cls=RootCommands, help="Train, measure and use Bradley-Terry reward models.", **QUIET)
data_app = typer.Typer(cls=Commands, help="Check and clean preference data.", add_completion=False, **QUIET)
data_app.command("check")(with_field_flags(data_check))
data_app.command("clean")(with_field_flags(data_clean))
app.add_typer(data_app, name="data", rich_help_panel="Data")
ensemble_app = typer.Typer(
    cls=Commands, help="Join reward models into an ensemble with uncertainty.", add_completion=False, **QUIET
)
ensemble_app.command("train", **HYDRA)(ensemble_train)
ensemble_app.command("join")(with_field_flags(ensemble_join))
app.add_typer(ensemble_app, name="ensemble", rich_help_panel="Couple to a policy")
compare_app = typer.Typer(
    cls=DefaultCommands,
    help="Compare runs or optimizers, or run a study. Finished runs: `rm-opt compare RUN RUN`. Optimizers: "
    "`rm-opt compare --optimizers A,B`.",
    add_completion=False,
    **QUIET,
)
for study_command in (compare_study.plan, compare_study.run, compare_study.status, compare_study.retry):
    compare_app.command()(study_command)
compare_app.command("report")(compare_study.report)
compare_app.command("across")(compare_study.across)
compare_app.command(DEFAULT)(compare)
compare_app.command(OF_OPTIMIZERS)(with_field_flags(compare_optimizers))
app.add_typer(compare_app, name="compare", rich_help_panel="Evaluate and compare")
for panel, commands in GROUPS.items():
    for command, settings in commands:
        app.command(rich_help_panel=panel, **settings)(with_field_flags(command))


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
