"""The start of a run in its folder: anew, after a checkpoint of the same run, or not at all since it has ended."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from rm_optimizer.core.pairs.dataset import TrainVal
from rm_optimizer.core.pairs.orders import SHUFFLED, PairOrder
from rm_optimizer.core.pairs.trained_pairs import TRAINED_PAIRS_FILE
from rm_optimizer.core.storage.checkpoint import read_checkpoint
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.run_folder import (
    EXPORT,
    IDENTITY_FILE,
    METRICS_FILE,
    OPTIONS_FILE,
    PAIR_REWARDS_FILE,
    RESULT_FILE,
    RunFolder,
    checkpoint_step,
)
from rm_optimizer.records.run_options import changed_options, has_same_length, options_of, require_same_options
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.config import Resume
from rm_optimizer.training.folder.record import RUN_KEY, RunRecord, Start
from rm_optimizer.training.folder.result import DataSummary, RunResult, RunStatus
from rm_optimizer.training.folder.resume import newest_checkpoint

log = logging.getLogger("rm_optimizer")

LEFT = (
    *(RESULT_FILE, BEST_FOLDER, "checkpoints", "evaluations", "landscape", "plots", "figures", "tensorboard", "wandb"),
    *(METRICS_FILE, "profile.csv", "profile.json", PAIR_REWARDS_FILE, "skipped_rows.txt"),
    TRAINED_PAIRS_FILE,
    *(OPTIONS_FILE, IDENTITY_FILE),
)
"""What a run leaves in its folder, in the order of removal: the result first, so that a kill leaves no finished run."""


def finished_result(config: TrainConfig) -> RunResult | None:
    """The result of a run that has ended already and that `resume=auto` therefore leaves as it is.

    Args:
        config: the options; `require_usable` has passed them.
    """
    run = RunFolder(Path(config.output_dir))
    result = RunResult.read(run.path)
    if config.resume != Resume.auto or result is None or not (run.path / EXPORT).is_file():
        return None
    identity, options = run.identity, options_of(config)
    if result.run_id is None or (identity is not None and identity.run_id != result.run_id):
        return None
    require_same_options(result.config, options)
    if result.status == RunStatus.finished and not has_same_length(result.config, options):
        return None
    return result


def finished_sentence(result: RunResult, config: TrainConfig) -> str:
    """The sentence that a run has ended already, with the options that therefore have no effect."""
    ended = "finished" if result.status == RunStatus.finished else "was stopped early"
    ignored = changed_options(result.config, options_of(config))
    rest = f"; {', '.join(ignored)} as given now: without effect" if ignored else ""
    return f"the run in {result.run_dir} {ended} after step {result.steps}; nothing is changed{rest}"


def begin(config: TrainConfig, run_dir: Path, *, is_first_rank: bool) -> Start:
    """Find the checkpoint to go on from, or clear the folder for a run that starts anew.

    Args:
        config: the options; `require_usable` has passed them.
        run_dir: the run folder.
        is_first_rank: True if this process may remove files.

    Raises:
        CheckpointError: if the checkpoint is of another run, or of a version that recorded none.
        ConfigError: if the options differ from the checkpoint's, or a finished run has no checkpoint to extend it from.
    """
    if config.resume == Resume.auto and (path := newest_checkpoint(run_dir)):
        return Start(path, _record_of(path, config, run_dir))
    run = RunFolder(run_dir)
    results = run.results
    if config.resume == Resume.auto and RESULT_FILE in results:
        raise ConfigError(
            f"resume=auto needs a checkpoint to extend the finished run in {run_dir}, but checkpoints/ holds no whole "
            "one; set the options back, set resume=restart, or choose another hydra.run.dir"
        )
    if is_first_rank and (results or (config.resume == Resume.restart and run.is_used)):
        log.info("starting anew in %s; what the run before left is removed", run_dir)
        clear(run_dir)
    if is_first_rank:
        (run_dir / TRAINED_PAIRS_FILE).unlink(missing_ok=True)  # of a start that failed before its first step
    return Start()


def _record_of(path: Path, config: TrainConfig, run_dir: Path) -> RunRecord:
    """The record of a checkpoint, which must belong to the run in the folder and to these options."""
    content = read_checkpoint(path)[0].get(RUN_KEY)
    again = "set resume=restart, or choose another hydra.run.dir"
    if content is None:
        raise CheckpointError(f"{path} does not say which run it belongs to, for an earlier version saved it; {again}")
    record = from_values(RunRecord, content)
    identity = RunFolder(run_dir).identity
    if identity is not None and identity.run_id != record.run_id:
        raise CheckpointError(
            f"{path} belongs to run {record.run_id}, but the folder to run {identity.run_id}; remove it, {again}"
        )
    require_same_options(record.options, options_of(config))
    if not (run_dir / METRICS_FILE).is_file():
        log.warning("%s is missing: its rows up to step %d are lost", run_dir / METRICS_FILE, checkpoint_step(path))
    return record


def require_same_order(before: RunRecord | DataSummary, order: PairOrder | None) -> None:
    """Refuse to continue a run in another order than it was started with.

    Args:
        before: record of the run.
        order: order of now; None is the shuffle by the seed.

    Raises:
        ConfigError: naming both orders.
    """
    now = order.identity if order else SHUFFLED
    if before.order != now:
        raise ConfigError(
            f"resume=auto continues a run in the order it started with, but order was {before.order}, is {now}; bring "
            "it back, set resume=restart, or choose another hydra.run.dir"
        )


def require_same_data(before: RunRecord | DataSummary, data: TrainVal) -> None:
    """Refuse to continue a run on other pairs than it was started with.

    Args:
        before: record of the run.
        data: pairs of now.

    Raises:
        ConfigError: naming the option whose pairs differ.
    """
    train, val = data.fingerprints
    for option, was, now in (
        ("data.train", before.train_fingerprint, train),
        ("data.val", before.val_fingerprint, val),
    ):
        if was != now:
            raise ConfigError(
                f"resume=auto continues a run on the pairs it started with, but those of {option} have changed "
                f"(fingerprint was {was}, is {now}); bring them back, set resume=restart, or choose another "
                "hydra.run.dir"
            )


def clear(run_dir: Path) -> None:
    """Remove what a run left in its folder; links to folders stay, and files of other kinds."""
    for name in LEFT:
        path = run_dir / name
        if path.is_dir():
            _empty(path)
        else:
            path.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
