"""Checkpoints of a run: files, random states, and the extension of a finished run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from rm_optimizer.optim import evaluation_weights
from rm_optimizer.optim.schedules import lr_factor
from rm_optimizer.records.randomness import random_state, set_random_state
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema.optimizers import ScheduleConfig


def random_states() -> list[dict[str, Any]]:
    """Return the `random_state` of each rank, in their order; every rank must take part."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [random_state()]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, random_state())
    return states


def set_random_states(states: Sequence[Mapping[str, Any]]) -> None:
    """Restore this rank's generators to their state in `random_states`."""
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    set_random_state(states[0 if is_alone else distributed.get_rank()])


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


log = logging.getLogger("rm_optimizer")


class Extension(pl.Callback):
    """Callback that puts the learning rate on the longer schedule before the first step, and logs the change.

    A checkpoint holds the rate that the shorter schedule gave the next step.

    Args:
        schedule: the schedule.
        from_steps: steps planned before.
        to_steps: steps planned now.
    """

    def __init__(self, schedule: ScheduleConfig, *, from_steps: int, to_steps: int) -> None:
        self.schedule = schedule
        self.from_steps = from_steps
        self.to_steps = to_steps

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Clear the mark of the last batch, since Lightning would end a run that was complete at its former length."""
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set each group's rate for the next step."""
        done = trainer.global_step
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            assert isinstance(scheduler, LambdaLR), "every schedule is a LambdaLR"
            for group, peak, factor in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = peak * factor(done)
        if trainer.is_global_zero:
            log.warning("%s", self._sentence(done))

    def _sentence(self, done: int) -> str:
        """The change of length, and of the learning rates if there is one."""
        before, after = lr_factor(self.schedule, self.from_steps), lr_factor(self.schedule, self.to_steps)
        told = f"the run is extended from {self.from_steps} to {self.to_steps} steps after step {done}"
        if all(before(step) == after(step) for step in range(done + 1)):
            return f"{told}; its learning rates are those of a run of {self.to_steps} steps"
        return (
            f"{told}; the {self.schedule.name} schedule of {self.to_steps} steps applies from there on: the learning "
            f"rate of step {done + 1} is {after(done):.3g} of its peak ({before(done):.3g} as planned before), so the "
            f"result is not that of a run that was started with {self.to_steps} steps"
        )


def extension_at(step: int, extensions: tuple[dict[str, Any], ...], schedule: ScheduleConfig) -> list[pl.Callback]:
    """Callback of a run whose length changes at the step where it continues; none if its length stays.

    Args:
        step: optimizer steps done when the run continues.
        extensions: changes of its length.
        schedule: the schedule.
    """
    if not extensions or extensions[-1]["after_step"] != step:
        return []
    last = extensions[-1]
    return [Extension(schedule, from_steps=last["from_steps"], to_steps=last["to_steps"])]
