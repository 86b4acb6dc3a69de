"""Start of a run in its folder: a new run, one after a checkpoint, or none since the run has ended."""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rm_optimizer.core.pairs.orders import PairOrder, identity_of
from rm_optimizer.core.pairs.overlap import TRAINED_PAIRS_FILE
from rm_optimizer.core.tokens.dataset import TrainVal
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.run_folder import (
    DIVERGED_FILE,
    DOCTOR_FILE,
    EXPORT,
    IDENTITY_FILE,
    METRICS_FILE,
    OPTIONS_FILE,
    PAIR_REWARDS_FILE,
    RESULT_FILE,
    RunFolder,
)
from rm_optimizer.records.run_options import RunRequest, changed_options, has_same_length, require_same_options
from rm_optimizer.schema.config import Resume
from rm_optimizer.training.folder.record import DataSummary, RunRecord, RunResult, RunStatus, Start, read_record

log = logging.getLogger("rm_optimizer")

LEFT = (
    *(RESULT_FILE, BEST_FOLDER, "checkpoints", "evaluations", "landscape", "plots", "figures", "tensorboard", "wandb"),
    *(METRICS_FILE, "profile.csv", "profile.json", PAIR_REWARDS_FILE, "skipped_rows.txt", DOCTOR_FILE),
    *(TRAINED_PAIRS_FILE, "readiness", "report"),
    *(OPTIONS_FILE, IDENTITY_FILE),
)
"""Files of a run in the order of removal: the result comes first, so that a kill leaves no finished run."""


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended already, so that `resume=auto` does not change it.

    Args:
        result: its result.
        ignored: options of this call, which therefore have no effect.
    """

    result: RunResult
    ignored: Sequence[str]

    def __str__(self) -> str:
        """Sentence on its end and on the options without effect."""
        ended = "finished" if self.result.status == RunStatus.finished else "was stopped early"
        rest = f"; {', '.join(self.ignored)} as given now: without effect" if self.ignored else ""
        return f"the run in {self.result.run_dir} {ended} after step {self.result.steps}; nothing is changed{rest}"


def ended_run(request: RunRequest) -> EndedRun | None:
    """The run that has ended already in the folder of a request; None if there is something left to do.

    Args:
        request: the run that is to start; `require_usable` has passed it.
    """
    run_dir, options = request.run_dir, request.options
    if request.resume != Resume.auto or not (run_dir / EXPORT).is_file() or (result := RunResult.read(run_dir)) is None:
        return None
    identity = RunFolder(run_dir).identity
    if result.run_id is None or (identity is not None and identity.run_id != result.run_id):
        return None
    require_same_options(result.config, options)
    if result.status == RunStatus.finished and not has_same_length(result.config, options):
        return None
    return EndedRun(result, changed_options(result.config, options))


def begin(request: RunRequest, *, is_first_rank: bool) -> Start:
    """Find the checkpoint to continue from, or clear the folder for a new run.

    Args:
        request: the run that is to start; `require_usable` has passed it.
        is_first_rank: True if this process may remove files.

    Raises:
        CheckpointError: if the checkpoint is of another run, or of a version that recorded none.
        ConfigError: if the options differ from the checkpoint's, or a finished run has no checkpoint to extend it from.
    """
    run_dir, run = request.run_dir, RunFolder(request.run_dir)
    if is_first_rank:
        (run_dir / DIVERGED_FILE).unlink(missing_ok=True)
    checkpoint = _newest_checkpoint(run_dir) if request.resume == Resume.auto else None
    if checkpoint is not None:
        before = read_record(checkpoint, run_dir)
        require_same_options(before.options, request.options)
        return Start(request.options, checkpoint, before)
    results = run.results
    if request.resume == Resume.auto and RESULT_FILE in results:
        raise ConfigError(
            f"resume=auto needs a checkpoint to extend the finished run in {run_dir}, but checkpoints/ holds no whole "
            "one; set the options back, set resume=restart, or choose another hydra.run.dir"
        )
    if is_first_rank and (results or (request.resume == Resume.restart and run.is_used)):
        log.info("starting a new run in %s; the files of the run before are removed", run_dir)
        clear(run_dir)
    if is_first_rank:
        (run_dir / TRAINED_PAIRS_FILE).unlink(missing_ok=True)  # left by a start that failed before its first step
    return Start(request.options)


def _newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest intact periodic checkpoint; one that its zip archive's checksums reject is skipped with a warning."""
    for step, path in reversed(RunFolder(run_dir).checkpoints.items()):
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            damage = f"checksum of {broken} does not match" if broken else None
        except (OSError, zipfile.BadZipFile, EOFError) as error:
            damage = str(error)
        if damage is None:
            log.info("resuming after step %d from %s", step, path)
            return path
        log.warning("skipping the damaged checkpoint %s (%s)", path, damage)
    return None


def require_same_pairs(before: RunRecord | DataSummary, data: TrainVal | None) -> None:
    """Refuse to continue a run on other pairs than it was started with.

    Args:
        before: record of the run.
        data: present pairs; None if they are not read again.

    Raises:
        ConfigError: naming the option whose pairs differ.
    """
    fingerprints = (before.train_fingerprint, before.val_fingerprint)
    for split, was, now in zip(
        ("train", "val"), fingerprints, data.fingerprints if data else fingerprints, strict=True
    ):
        if was != now:
            raise ConfigError(
                f"resume=auto continues a run on the pairs it started with, but those of data.{split} have changed "
                f"(fingerprint was {was}, is {now}); bring them back, set resume=restart, or choose another "
                "hydra.run.dir"
            )


def require_same_order(before: RunRecord | DataSummary, order: PairOrder | None) -> None:
    """Refuse to continue a run in another order than it was started with.

    Args:
        before: record of the run.
        order: present order; None is the shuffle by the seed.

    Raises:
        ConfigError: naming both orders.
    """
    if before.order != (identity := identity_of(order)):
        raise ConfigError(
            f"resume=auto continues a run in the order it started with, but order was {before.order}, is {identity}; "
            "bring it back, set resume=restart, or choose another hydra.run.dir"
        )


def clear(run_dir: Path) -> None:
    """Remove the files of a run from its folder; links to folders and other files stay."""
    for name in LEFT:
        linked = run_dir / name
        is_link = linked.is_symlink() and linked.is_dir()
        for path in linked.iterdir() if is_link else [linked]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
