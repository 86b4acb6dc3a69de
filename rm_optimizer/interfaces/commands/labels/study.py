"""`rm-opt study labels`: labels that acquisition functions save, over many splits and with a placebo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.pairs import PairOptions

if TYPE_CHECKING:
    from rm_optimizer.data_efficiency.savings.label_study import LabelStudy
    from rm_optimizer.experiments.study.driver import Study, StudyStatus
    from rm_optimizer.experiments.study.plan import PlannedTrial


def study_labels(
    source: PairOptions,
    folder: Annotated[Path, Argument(help="Folder of the study; pools of further calls are added to it.")],
    data: Annotated[
        list[str], Option("--data", help="Preference pairs; may be repeated. Without it: three synthetic pools.")
    ] = [],  # noqa: B006
    model: Annotated[
        str | None, Option("--model", help="Take its last-layer features of the pairs, in place of words and lengths.")
    ] = None,
    name: Annotated[str | None, Option("--name", help="Name of the pool in the tables; default: the file's.")] = None,
    splits: Annotated[int, Option("--splits", min=2, help="Random splits into pool and test pairs.")] = 40,
    budget: Annotated[int, Option("--budget", min=3, help="Labels at which rules are compared.")] = 512,
    start: Annotated[int, Option("--start", min=2, help="Random labels that every rule begins with.")] = 64,
    batch: Annotated[int, Option("--batch", min=1, help="Labels of a round.")] = 64,
    flips: Annotated[float, Option("--flips", help="Share of the pool's labels to turn around.")] = 0.0,
    bootstrap: Annotated[int, Option("--bootstrap", min=1, help="Resamples of splits for the intervals.")] = 1000,
) -> None:
    """Compare rules that choose pairs to label with a random draw, and with a second one as placebo.

    A stopped command goes on when repeated. The folder gets savings.json, and pictures of the curves and the savings.
    """
    from rm_optimizer.data_efficiency.savings.label_pools import SyntheticPool
    from rm_optimizer.data_efficiency.savings.label_study import (
        TASK,
        LabelStudy,
        planned_splits,
        require_one_pool_a_name,
    )
    from rm_optimizer.experiments.study.driver import Study
    from rm_optimizer.experiments.study.plan import PLAN_FILE, StudyPlan, publish
    from rm_optimizer.reporting.label_studies.label_savings import print_savings, write_savings

    if not data and (model is not None or name is not None):
        raise ConfigError("--model and --name are for --data; synthetic pools bring their features and names")
    study = LabelStudy(budget, start, batch, flips)
    if data:
        trials = _real_pool(source, folder, data, model, name, study, splits)
    else:
        trials = [trial for pool in SyntheticPool for trial in planned_splits(study, pool, splits)]
    if (folder / PLAN_FILE).exists():
        require_one_pool_a_name([*StudyPlan.read(folder).trials, *trials])
    publish(folder, TASK, trials, extends=True)
    runner = Study(folder)
    state = _run(runner)
    found = write_savings([*runner.rows()], folder, num_bootstrap=bootstrap)
    print_savings(found)
    print(f"tables and pictures: {folder}")
    if state.errors:
        name, error = next(iter(state.errors.items()))
        raise ConfigError(f"{len(state.errors)} splits failed, the first, {folder / 'trials' / name}, with {error}")


def _run(study: Study) -> StudyStatus:
    """Run what is left of a study in this process, and show how far it is."""
    from rm_optimizer.experiments.study.executors import InlineExecutor
    from rm_optimizer.records.progress import progress

    done = len(study.status().seconds)
    with progress("label study", "splits") as show:
        show(done, len(study.plan.trials))

        def count(*ended: object) -> None:
            nonlocal done
            done += 1
            show(done, len(study.plan.trials))

        return study.run(InlineExecutor(), on_trial=count)


def _real_pool(
    source: PairOptions,
    folder: Path,
    data: Sequence[str],
    model: str | None,
    name: str | None,
    study: LabelStudy,
    splits: int,
) -> list[PlannedTrial]:
    """Trials of these pairs, with their features written into the folder."""
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.core.pairs.pair import digest
    from rm_optimizer.data_efficiency.savings.label_pools import LabeledFeatures
    from rm_optimizer.data_efficiency.savings.label_study import planned_splits
    from rm_optimizer.interfaces.commands.labels.features import fixed_differences
    from rm_optimizer.interfaces.saved_model import SavedModel

    pairs = source.load(list(data))
    scorer = None if model is None else SavedModel(model).load()
    key = digest([[pair.pair_id for pair in pairs], None if scorer is None else scorer_digest(scorer)])
    pool = name or f"{Path(data[0]).name.partition('.')[0]}{'' if model is None else f' by {Path(model).name}'}"
    path = folder / "features" / f"{key}.npz"
    if not path.exists():
        LabeledFeatures.of(pairs, fixed_differences(pairs, scorer, folder / "features" / key)).write(path)
    return planned_splits(study, pool, splits, path)
