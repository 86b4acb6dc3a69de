"""Record of a run: its identity and its plan, in its folder and in each of its checkpoints."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_optimizer.core.pairs.dataset import TrainVal
from rm_optimizer.core.pairs.orders import SHUFFLED, PairOrder, identity_of
from rm_optimizer.core.rows.readers import is_hub_name
from rm_optimizer.core.storage.loading import read_checkpoint
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.run_folder import (
    IDENTITY_FILE,
    METRICS_FILE,
    OPTIONS_FILE,
    RunFolder,
    RunIdentity,
    checkpoint_step,
)
from rm_optimizer.schema import DataConfig

log = logging.getLogger("rm_optimizer")

RUN_KEY = "run"
"""Entry of a checkpoint's payload that identifies its run."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Identity and plan of the run that a checkpoint belongs to.

    Args:
        run_id: the run's id.
        train_fingerprint: digest of the training pairs.
        val_fingerprint: digest of the validation pairs.
        num_steps: optimizer steps planned when the checkpoint was saved.
        options: the options of the run.
        extensions: changes of the length, each `{"after_step", "from_steps", "to_steps"}`.
        order: identity of the order of the training pairs.
    """

    run_id: str
    train_fingerprint: str
    val_fingerprint: str
    num_steps: int
    options: dict[str, Any]
    extensions: tuple[dict[str, int], ...] = ()
    order: str = SHUFFLED

    def payload(self, step: int) -> dict[str, Any]:
        """The record as values that load without code, with the steps done."""
        return {**vars(self), "extensions": list(self.extensions), "step": step}


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


def _extensions(before: RunRecord, step: int, num_steps: int) -> tuple[dict[str, int], ...]:
    """Changes of a run's length, including that of the resumption at a step."""
    if num_steps < before.num_steps:
        raise ConfigError(
            f"resume=auto makes a run longer, not shorter, but training.max_steps and training.epochs gave "
            f"{before.num_steps} steps, give {num_steps}; restore them, or choose another hydra.run.dir"
        )
    if num_steps == before.num_steps:
        return before.extensions
    return (*before.extensions, {"after_step": step, "from_steps": before.num_steps, "to_steps": num_steps})


def recorded(start: Start, data: TrainVal, order: PairOrder | None, num_steps: int) -> RunRecord:
    """Record of the run that starts now, which its checkpoints contain.

    Raises:
        ConfigError: if a resumed run would be shorter than planned.
    """
    before = start.before
    train, val = data.fingerprints
    return RunRecord(
        run_id=before.run_id if before else secrets.token_hex(8),
        train_fingerprint=train,
        val_fingerprint=val,
        num_steps=num_steps,
        options=start.options,
        extensions=() if before is None else _extensions(before, start.step, num_steps),
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


def absolute_source(source: Any) -> Any:
    """Sources of `data.train` or `data.val` with absolute paths; hub names stay.

    Example:
        >>> absolute_source([{"path": "/data/a.jsonl", "weight": 2.0}, "org/name"])
        [{'path': '/data/a.jsonl', 'weight': 2.0}, 'org/name']
    """
    if isinstance(source, str):
        return source if is_hub_name(source) else os.path.abspath(os.path.expanduser(source))
    if isinstance(source, Mapping):
        return {name: absolute_source(value) if name == "path" else value for name, value in source.items()}
    return [absolute_source(item) for item in source] if isinstance(source, list | tuple) else source
