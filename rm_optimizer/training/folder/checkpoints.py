"""Checkpoints of a run: written under a temporary name, renamed when complete, the oldest removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytorch_lightning as pl

from rm_optimizer.optim import evaluation_weights
from rm_optimizer.records.run_folder import RunFolder


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Path of the checkpoint after `step` optimizer steps."""
    return RunFolder(run_dir).best_checkpoint.with_name(f"step-{step:08d}.ckpt")


def save_checkpoint(trainer: pl.Trainer, path: Path, *, weights_only: bool = False) -> Path:
    """Save a Lightning checkpoint atomically, after every logger's rows up to this step are on disk.

    Its weights are those that an evaluation at this step uses. An optimizer that trains other weights keeps them in its
    own state, and a resumed run restores them from there.
    """
    for logger in trainer.loggers:
        logger.save()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with evaluation_weights(trainer.optimizers[0]):
        trainer.save_checkpoint(temporary, weights_only=weights_only)
    if trainer.is_global_zero:
        os.replace(temporary, path)
    trainer.strategy.barrier("checkpoint")
    return path


def last_good_checkpoint(run_dir: Path, before: int) -> Path | None:
    """The newest periodic checkpoint of fewer than `before` steps, else the best one, else None."""
    run = RunFolder(run_dir)
    older, best = [path for step, path in run.checkpoints.items() if step < before], run.best_checkpoint
    return older[-1] if older else best if best.exists() else None


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` periodic checkpoints."""
    for path in list(RunFolder(run_dir).checkpoints.values())[:-keep]:
        path.unlink(missing_ok=True)
