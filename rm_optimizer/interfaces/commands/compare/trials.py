"""Options and printed plans that all commands with trials share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from rm_optimizer.experiments.study import PlannedTrial

Executors = Annotated[str, Option("--executor", help="Where trials run: inline, process or ray.")]
Workers = Annotated[
    int | None, Option("--workers", min=1, help="Trials at a time; default: one per GPU, one without GPUs.")
]
Retries = Annotated[int, Option("--retries", min=0, help="Further attempts at a failed trial.")]


def print_plan(folder: Path, trials: Sequence[PlannedTrial], *, estimate: bool = True) -> None:
    """Print the trials of a plan, and an estimate of their duration from a few steps of the first one."""
    for trial in trials:
        print(f"{trial.name}  {trial.label}")
    print(f"{len(trials)} trials; rm-opt compare run {folder} starts them", flush=True)
    if estimate:
        from rm_optimizer.experiments.cost import study_cost
        from rm_optimizer.experiments.training_trials import config_of

        print(study_cost([config_of(trial.spec["options"]) for trial in trials]))
