"""`rm-opt study cleaning`: turned labels found, and accuracy gained without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.interfaces.commands.studies.splits import (
    pool_of_features,
    require_no_failure,
    require_one_source,
    run_splits,
)
from rm_optimizer.interfaces.pairs import PairOptions


def study_cleaning(
    source: PairOptions,
    folder: Annotated[Path, Argument(help="Folder of the study; pools of further calls are added to it.")],
    data: Annotated[
        list[str], Option("--data", help="Preference pairs; may be repeated. Without it: two synthetic pools.")
    ] = [],  # noqa: B006
    model: Annotated[
        str | None, Option("--model", help="Take its last-layer features of the pairs, in place of words and lengths.")
    ] = None,
    name: Annotated[str | None, Option("--name", help="Name of the pool in the table; default: the file's.")] = None,
    splits: Annotated[int, Option("--splits", min=2, help="Random splits into training and test pairs.")] = 40,
    pairs: Annotated[int, Option("--pairs", min=20, help="Training pairs of a split.")] = 1000,
    flips: Annotated[
        list[float], Option("--flips", help="Share of training labels to turn around; may be repeated.")
    ] = [0.0, 0.2],  # noqa: B006
    false_positive_rate: Annotated[
        float, Option("--false-positive-rate", help="Largest share of right labels to take out, in (0, 1).")
    ] = 0.05,
) -> None:
    """Turn labels around, look for them as data clean does, and train with and without those that it suspects.

    A stopped command goes on when repeated. Test labels are not turned. The folder gets cleaning.json.
    """
    from rm_optimizer.data_efficiency.cleaning.cleaning_study import (
        TASK,
        CleaningWorld,
        cleaning_rows,
        planned_cleanings,
    )
    from rm_optimizer.reporting.label_studies.cleaning import print_cleaning, write_cleaning

    require_one_source(data, model, name)
    pools = (
        [pool_of_features(source, folder, data, model, name)] if data else [(world, None) for world in CleaningWorld]
    )
    trials = [
        trial
        for pool, features in pools
        for trial in planned_cleanings(
            pool, splits, flips, num_pairs=pairs, false_positive_rate=false_positive_rate, features=features
        )
    ]
    runner, state = run_splits(folder, TASK, trials)
    rows = cleaning_rows(runner.rows())
    write_cleaning(rows, folder)
    print_cleaning(rows)
    print(f"numbers: {folder / 'cleaning.json'}")
    require_no_failure(folder, state)
