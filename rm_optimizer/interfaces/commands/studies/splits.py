"""The parts that `study labels` and `study cleaning` share: pools from options, and splits as trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.pairs import PairOptions

if TYPE_CHECKING:
    from rm_optimizer.experiments.study.driver import Study, StudyStatus
    from rm_optimizer.experiments.study.plan import PlannedTrial


def require_one_source(data: Sequence[str], model: str | None, name: str | None) -> None:
    """Refuse options of real pairs without real pairs.

    Raises:
        ConfigError: naming the options.
    """
    if not data and (model is not None or name is not None):
        raise ConfigError("--model and --name are for --data; synthetic pools bring their features and names")


def pool_of_features(
    source: PairOptions, folder: Path, data: Sequence[str], model: str | None, name: str | None
) -> tuple[str, Path]:
    """Name of a pool of real pairs, and the path of its features, which are written into the folder once."""
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.core.pairs.pair import digest
    from rm_optimizer.data_efficiency.savings.label_pools import LabeledFeatures
    from rm_optimizer.interfaces.commands.labels.features import fixed_differences
    from rm_optimizer.interfaces.saved_model import SavedModel

    pairs = source.load(list(data))
    scorer = None if model is None else SavedModel(model).load()
    key = digest([[pair.pair_id for pair in pairs], None if scorer is None else scorer_digest(scorer)])
    pool = name or f"{Path(data[0]).name.partition('.')[0]}{'' if model is None else f' by {Path(model).name}'}"
    path = folder / "features" / f"{key}.npz"
    if not path.exists():
        LabeledFeatures.of(pairs, fixed_differences(pairs, scorer, folder / "features" / key)).write(path)
    return pool, path


def run_splits(folder: Path, task: str, trials: Sequence[PlannedTrial]) -> tuple[Study, StudyStatus]:
    """Add splits to the study in a folder, run those without a result in this process, and show the progress.

    Raises:
        ConfigError: if the folder holds another study, or a pool of the same name with other options.
    """
    from rm_optimizer.data_efficiency.savings.label_study import require_one_pool_a_name
    from rm_optimizer.experiments.study.driver import Study
    from rm_optimizer.experiments.study.executors import InlineExecutor
    from rm_optimizer.experiments.study.plan import PLAN_FILE, StudyPlan, publish
    from rm_optimizer.records.progress import progress

    if (folder / PLAN_FILE).exists():
        require_one_pool_a_name([*StudyPlan.read(folder).trials, *trials])
    publish(folder, task, trials, extends=True)
    study = Study(folder)
    done = len(study.status().seconds)
    with progress("study", "splits") as show:
        show(done, len(study.plan.trials))

        def count(*ended: object) -> None:
            nonlocal done
            done += 1
            show(done, len(study.plan.trials))

        return study, study.run(InlineExecutor(), on_trial=count)


def require_no_failure(folder: Path, state: StudyStatus) -> None:
    """Require that no split failed.

    Raises:
        ConfigError: with the first one's error.
    """
    if state.errors:
        name, error = next(iter(state.errors.items()))
        raise ConfigError(f"{len(state.errors)} splits failed, the first, {folder / 'trials' / name}, with {error}")
