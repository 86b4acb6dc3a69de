"""`rm-opt study readiness`: predictors of policies' gold reward, chosen on some worlds and tested on others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from rm_optimizer.interfaces.commands.compare.trials import Executors, Workers

if TYPE_CHECKING:
    from rm_optimizer.experiments.study.plan import PlannedTrial
    from rm_optimizer.experiments.study.trial import TrialResult


def study_readiness(
    folder: Annotated[Path, Argument(help="Folder of the study.")],
    worlds: Annotated[
        Literal["all", "development", "test"],
        Option("--worlds", help="development chooses the features, test uses that choice."),
    ] = "all",
    models: Annotated[int, Option("--models", min=6, help="Reward models in each world.")] = 48,
    steps: Annotated[int, Option("--steps", min=10, help="Optimizer steps for each policy.")] = 200,
    executor: Executors = "inline",
    workers: Workers = None,
) -> None:
    """Validate the readiness score on synthetic worlds.

    The worlds have a gold reward. Worlds 0-2 choose the score, and worlds 3-8 test it once. Trains reward models, and
    optimizes a policy against each. Writes frozen.json, validation.json, fitted.json (the score's coefficients) and a
    picture into FOLDER. A world takes about seven minutes on one core. Repeat a stopped command to continue it.
    """
    from rm_optimizer.experiments.readiness.measurement import WorldSize
    from rm_optimizer.experiments.readiness.study import FITTED_FILE, VALIDATION_FILE, ReadinessStudy
    from rm_optimizer.experiments.study.executors import executor_named
    from rm_optimizer.reporting.readiness.study import print_choice, print_validation, write_study_figure

    study, runs = ReadinessStudy(folder, WorldSize(models=models, steps=steps)), executor_named(executor, workers)
    if worlds != "test":
        print_choice(study.develop(runs, _print_world))
    if worlds != "development":
        found = study.tested(runs, _print_world)
        print_validation(found)
        write_study_figure(found, folder)
        print(f"tables, coefficients and picture: {folder} ({VALIDATION_FILE}, {FITTED_FILE})")


def _print_world(planned: PlannedTrial, result: TrialResult | None) -> None:
    ended = "failed" if result is None else f"{result.status} after {result.seconds:.0f} s"
    print(f"{planned.label}: {ended}", flush=True)
