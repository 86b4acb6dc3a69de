"""`rm-opt scaling`: the learning curve over the number of pairs, and the number of pairs that a gain needs."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.commands.compare import Executors, Workers

OWNED = MappingProxyType(
    {
        "data.max_pairs": "--sizes says how many pairs",
        "data.split_seed": "each run has its own seed",
        "seed": "--seeds says how many",
        "output_dir": "runs are in the folder of the study",
        "hydra.run.dir": "runs are in the folder of the study",
    }
)
"""Options that the study sets itself, each with the reason."""


def scaling(
    folder: Annotated[Path, Argument(help="Folder of the study.")],
    overrides: Annotated[list[str] | None, Argument(help="Options of all runs, as for rm-opt train.")] = None,
    sizes: Annotated[
        str | None,
        Option(
            "--sizes", help="Numbers of training pairs, such as 500,1000,2000,4000; default: all, halved four times."
        ),
    ] = None,
    seeds: Annotated[int, Option("--seeds", min=2, help="Runs at each size.")] = 3,
    gain: Annotated[float, Option("--gain", help="Gain in accuracy to plan for, in percentage points.")] = 2.0,
    executor: Executors = "process",
    workers: Workers = None,
) -> None:
    """Estimate how many more pairs a gain in accuracy needs.

    Trains at several sizes, and fits accuracy and NLL over the number of pairs. Writes scaling.json and pictures of the
    curves into FOLDER. Repeat a stopped command to continue it.
    """
    from rm_optimizer.data_efficiency.scaling import measure_scaling
    from rm_optimizer.experiments.study import TrialLines
    from rm_optimizer.experiments.training_trials import require_shared
    from rm_optimizer.experiments.trial import executor_named
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.reporting.labels import print_scaling, write_scaling
    from rm_optimizer.schema import TrainConfig

    require_shared(overrides or [], OWNED, "a scaling study")
    given = _numbers(sizes)
    config = checked(overrides or [], TrainConfig, writable=False)
    report = measure_scaling(
        config,
        folder,
        sizes=given,
        num_seeds=seeds,
        gain=gain / 100,
        executor=executor_named(executor, workers),
        watch=TrialLines.of,
    )
    write_scaling(report, folder)
    print_scaling(report)
    print(f"numbers and pictures: {folder}")


def _numbers(sizes: str | None) -> list[int] | None:
    """Parse numbers separated by commas."""
    if sizes is None:
        return None
    try:
        return [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes must be whole numbers with commas between them, got '{sizes}'") from None
