"""`rm-opt compare RUN RUN`: a comparison of finished runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

RESULTS = Path("outputs", "compare")
"""Default folder of comparisons."""


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders, or folders of several runs, such as a sweep's.")],
    output: Annotated[
        Path | None,
        Option("--output", help="Folder for JSON, Parquet and pictures; default: one by time in outputs/compare."),
    ] = None,
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000,
) -> None:
    """Compare finished runs on their common validation pairs.

    The first run's arm is the baseline. Runs that differ only in the seed form an arm. Differences are paired by
    prompt, and by seed if there are several.
    """
    from rm_optimizer.experiments.compared_runs import read_runs
    from rm_optimizer.experiments.run_comparison import compare_runs
    from rm_optimizer.interfaces.outputs import made_folder
    from rm_optimizer.reporting.comparison import print_comparison, write_comparison

    comparison = compare_runs(read_runs(runs), num_bootstrap=bootstrap)
    folder = made_folder(output or RESULTS / f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    print_comparison(comparison)
    write_comparison(comparison, folder)
    print(f"JSON, Parquet and pictures: {folder}")
