"""Start of a run in its folder, and the record of its identity and plan.

The start is a new run, one after a checkpoint, or none since the run has ended.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shutil
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rm_optimizer.core.storage.loading import read_checkpoint
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.orders import PairOrder
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
    RunIdentity,
    checkpoint_step,
)
from rm_optimizer.records.run_options import changed_options, has_same_length, options_of, require_same_options
from rm_optimizer.schema import DataConfig
from rm_optimizer.schema.config import Resume, TrainConfig
from rm_optimizer.training.folder.record import (
    RUN_KEY,
    SHUFFLED,
    DataSummary,
    RunRecord,
    RunResult,
    RunStatus,
    absolute_source,
)

log = logging.getLogger("rm_optimizer")

LEFT = (
    *(RESULT_FILE, BEST_FOLDER, "checkpoints", "evaluations", "landscape", "plots", "figures", "tensorboard", "wandb"),
    *(METRICS_FILE, "profile.csv", "profile.json", PAIR_REWARDS_FILE, "skipped_rows.txt", DOCTOR_FILE),
    *(TRAINED_PAIRS_FILE, "readiness", "report"),
    *(OPTIONS_FILE, IDENTITY_FILE),
)
"""Files of a run in the order of removal: the result comes first, so that a kill leaves no finished run."""


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Args:
        options: the options of the run, as JSON values.
        checkpoint: the checkpoint to continue from; None starts a new run.
        before: the record of that checkpoint.
    """

    options: dict[str, Any]
    checkpoint: Path | None = None
    before: RunRecord | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done already."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else 0


def recorded(start: Start, data: TrainVal, order: PairOrder | None, num_steps: int) -> RunRecord:
    """Record of the run that starts now, which its checkpoints contain.

    Raises:
        ConfigError: if a resumed run would be shorter than planned.
    """
    before = start.before
    train, val = data.fingerprints
    extensions: tuple[dict[str, int], ...] = () if before is None else before.extensions
    if before is not None and num_steps < before.num_steps:
        raise ConfigError(
            f"resume=auto makes a run longer, not shorter, but training.max_steps and training.epochs gave "
            f"{before.num_steps} steps, give {num_steps}; restore them, or choose another hydra.run.dir"
        )
    if before is not None and num_steps > before.num_steps:
        extensions += ({"after_step": start.step, "from_steps": before.num_steps, "to_steps": num_steps},)
    return RunRecord(
        run_id=before.run_id if before else secrets.token_hex(8),
        train_fingerprint=train,
        val_fingerprint=val,
        num_steps=num_steps,
        options=start.options,
        extensions=extensions,
        order=identity_of(order),
    )


def read_record(path: Path, run_dir: Path) -> RunRecord:
    """The record of a checkpoint, which must belong to the run in the folder.

    Raises:
        CheckpointError: if it is of another run, or of a version that recorded none.
    """
    content = read_checkpoint(path)[0].get(RUN_KEY)
    again = "set resume=restart, or choose another hydra.run.dir"
    if content is None:
        raise CheckpointError(f"{path} does not name its run, since an earlier version saved it; {again}")
    record = from_values(RunRecord, content)
    identity = RunFolder(run_dir).identity
    if identity is not None and identity.run_id != record.run_id:
        raise CheckpointError(
            f"{path} belongs to run {record.run_id}, but the folder to run {identity.run_id}; remove it, {again}"
        )
    if not (run_dir / METRICS_FILE).is_file():
        log.warning("%s is missing: its rows up to step %d are lost", run_dir / METRICS_FILE, checkpoint_step(path))
    return record


def write_record(record: RunRecord, data: DataConfig | None, run_dir: Path) -> None:
    """Write `identity.json` and `options.json` into the run folder; `data` is None if pairs came from memory."""
    identity = RunIdentity(
        run_id=record.run_id,
        directory=os.getcwd(),
        sources={name: absolute_source(getattr(data, name)) for name in ("train", "val")} if data else {},
        train_fingerprint=record.train_fingerprint,
        val_fingerprint=record.val_fingerprint,
    )
    write_text(run_dir / IDENTITY_FILE, identity.to_json() + "\n")
    write_text(run_dir / OPTIONS_FILE, json.dumps(record.options, indent=2) + "\n")


def new_folder() -> str:
    """A run folder that does not exist yet, named after the present time as the command line names them."""
    base = Path("outputs", "train") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return str(next(folder for folder in itertools.chain([base], numbered) if not folder.exists()))


def ended_run(config: TrainConfig) -> tuple[RunResult, str] | None:
    """The run in a folder that has ended already; None if there is something left to do.

    Args:
        config: options of the run that is to start; `require_usable` has passed them.

    Returns:
        The result, and a sentence on its end and on the changed options, which have no effect.
    """
    run_dir, options = Path(config.output_dir), options_of(config)
    if config.resume != Resume.auto or not (run_dir / EXPORT).is_file() or (result := RunResult.read(run_dir)) is None:
        return None
    identity = RunFolder(run_dir).identity
    if result.run_id is None or (identity is not None and identity.run_id != result.run_id):
        return None
    require_same_options(result.config, options)
    if result.status == RunStatus.finished and not has_same_length(result.config, options):
        return None
    ended = "finished" if result.status == RunStatus.finished else "was stopped early"
    ignored = changed_options(result.config, options)
    rest = f"; {', '.join(ignored)} as given now: without effect" if ignored else ""
    return result, f"the run in {result.run_dir} {ended} after step {result.steps}; nothing is changed{rest}"


def begin(config: TrainConfig, *, is_first_rank: bool) -> Start:
    """Find the checkpoint to continue from, or clear the folder for a new run.

    Args:
        config: options of the run that is to start; `require_usable` has passed them.
        is_first_rank: True if this process may remove files.

    Raises:
        CheckpointError: if the checkpoint is of another run, or of a version that recorded none.
        ConfigError: if the options differ from the checkpoint's, or a finished run has no checkpoint to extend it from.
    """
    run_dir, options = Path(config.output_dir), options_of(config)
    run = RunFolder(run_dir)
    if is_first_rank:
        (run_dir / DIVERGED_FILE).unlink(missing_ok=True)
    checkpoint = _newest_checkpoint(run_dir) if config.resume == Resume.auto else None
    if checkpoint is not None:
        before = read_record(checkpoint, run_dir)
        require_same_options(before.options, options)
        return Start(options, checkpoint, before)
    results = run.results
    if config.resume == Resume.auto and RESULT_FILE in results:
        raise ConfigError(
            f"resume=auto needs a checkpoint to extend the finished run in {run_dir}, but checkpoints/ holds no whole "
            "one; set the options back, set resume=restart, or choose another hydra.run.dir"
        )
    if is_first_rank and (results or (config.resume == Resume.restart and run.is_used)):
        log.info("starting a new run in %s; the files of the run before are removed", run_dir)
        clear(run_dir)
    if is_first_rank:
        (run_dir / TRAINED_PAIRS_FILE).unlink(missing_ok=True)  # left by a start that failed before its first step
    return Start(options)


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
                f"resume=auto continues a run on the pairs it started with, but the pairs of data.{split} have changed "
                f"(fingerprint was {was}, is {now}); bring them back, set resume=restart, or choose another "
                "hydra.run.dir"
            )


def identity_of(order: PairOrder | None) -> str:
    """Identity of an order; None is the shuffle by the seed."""
    return SHUFFLED if order is None else order.identity


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
