"""`rm-opt study labels`: the labels that acquisition functions save, over many splits and with a placebo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.interfaces.commands.studies.splits import (
    pool_of_features,
    require_no_failure,
    require_one_source,
    run_splits,
)
from rm_optimizer.interfaces.pairs import PairOptions


def study_labels(
    source: PairOptions,
    folder: Annotated[Path, Argument(help="Folder of the study; later commands add their pools to it.")],
    data: Annotated[
        list[str], Option("--data", help="Preference pairs; may be repeated. Default: synthetic pools.")
    ] = [],  # noqa: B006
    pools: Annotated[
        list[str], Option("--pool", help="Synthetic pool; may be repeated. Default: all, without --data.")
    ] = [],  # noqa: B006
    model: Annotated[
        str | None, Option("--model", help="Model whose last-layer features are used, in place of words and lengths.")
    ] = None,
    name: Annotated[str | None, Option("--name", help="Name of the pool in the tables; default: the file's.")] = None,
    splits: Annotated[int, Option("--splits", min=2, help="Random splits into pool and test pairs.")] = 40,
    budget: Annotated[int, Option("--budget", min=3, help="Number of labels at which rules are compared.")] = 512,
    start: Annotated[int, Option("--start", min=2, help="Random labels that every rule starts with.")] = 64,
    batch: Annotated[int, Option("--batch", min=1, help="Labels in each round.")] = 64,
    flips: Annotated[float, Option("--flips", help="Share of the pool's labels to flip, in [0, 0.5).")] = 0.0,
    bootstrap: Annotated[
        int, Option("--bootstrap", min=1, help="Bootstrap resamples of splits for the intervals.")
    ] = 1000,
) -> None:
    """Measure the labels that acquisition functions save.

    Compares rules that choose pairs to label with a random draw. A second random draw is the placebo. Writes
    savings.json and pictures of curves and savings into FOLDER. Repeat a stopped command to continue it.
    """
    from rm_optimizer.data_efficiency.savings.label_study import TASK, LabelStudy, planned_splits, savings_by_pool
    from rm_optimizer.reporting.label_studies.label_savings import print_savings, write_savings

    require_one_source(data, model, name)
    wanted = _pools(pools, data)
    study = LabelStudy(budget, start, batch, flips)
    if data:
        pool, features = pool_of_features(source, folder, data, model, name)
        trials = planned_splits(study, pool, splits, features)
    else:
        trials = [trial for pool in wanted for trial in planned_splits(study, pool, splits)]
    runner, state = run_splits(folder, TASK, trials)
    rows = [*runner.rows()]
    found = savings_by_pool(rows, num_bootstrap=bootstrap)
    write_savings(found, rows, folder)
    print_savings(found)
    print(f"tables and pictures: {folder}")
    require_no_failure(folder, state)


def _pools(names: Sequence[str], data: Sequence[str]) -> Sequence[str]:
    """Synthetic pools to run; all if none is named."""
    from rm_optimizer.data_efficiency.savings.label_pools import SyntheticPool

    if data and names:
        raise ConfigError("--pool names a synthetic pool, and --data real pairs; leave one out")
    if unknown := [name for name in names if name not in [*SyntheticPool]]:
        raise ConfigError(did_you_mean("--pool", unknown[0], [*SyntheticPool]))
    return [*dict.fromkeys(names)] or [*SyntheticPool]
