"""`rm-opt study cleaning`: the detection of flipped labels, and the accuracy gained without them."""

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
    folder: Annotated[Path, Argument(help="Folder of the study; later commands add their pools to it.")],
    data: Annotated[
        list[str], Option("--data", help="Preference pairs; may be repeated. Default: two synthetic pools.")
    ] = [],  # noqa: B006
    model: Annotated[
        str | None, Option("--model", help="Model whose last-layer features are used, in place of words and lengths.")
    ] = None,
    name: Annotated[str | None, Option("--name", help="Name of the pool in the table; default: the file's.")] = None,
    splits: Annotated[int, Option("--splits", min=2, help="Random splits into training and test pairs.")] = 40,
    pairs: Annotated[int, Option("--pairs", min=20, help="Training pairs in each split.")] = 1000,
    flips: Annotated[
        list[float], Option("--flips", help="Share of the training labels to flip, in [0, 0.5); may be repeated.")
    ] = [0.0, 0.2],  # noqa: B006
    false_positive_rate: Annotated[
        float, Option("--false-positive-rate", help="Largest share of right labels to remove, in (0, 1).")
    ] = 0.05,
) -> None:
    """Measure the effect of removing suspected labels.

    Flips training labels, searches for them as rm-opt data clean does, and trains with and without the suspects. Test
    labels are not flipped. Writes cleaning.json into FOLDER. Repeat a stopped command to continue it.
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
