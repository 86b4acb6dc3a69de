"""Checkpoints of a run: files, random states, and the extension of a finished run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from rm_optimizer.optim import evaluation_weights
from rm_optimizer.optim.schedules import lr_factor
from rm_optimizer.records.accelerator import rank_in_group
from rm_optimizer.records.files import writing
from rm_optimizer.records.randomness import random_state, set_random_state
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema.optimizers import ScheduleConfig
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.stopping import StopSignal

log = logging.getLogger("rm_optimizer")

TEMPORARY = Path(tempfile.gettempdir())
"""Folder in which Lightning writes a checkpoint before it is moved to the run folder."""


def random_states() -> list[dict[str, Any]]:
    """Return the `random_state` of each rank, in their order; every rank must take part."""
    if (size := rank_in_group()[1]) == 1:
        return [random_state()]
    states: list[Any] = [None] * size
    distributed.all_gather_object(states, random_state())
    return states


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


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` periodic checkpoints."""
    for path in list(RunFolder(run_dir).checkpoints.values())[:-keep]:
        path.unlink(missing_ok=True)


@dataclass(eq=False)
class Checkpoints(pl.Callback):
    """Callback that saves a checkpoint every `every` steps, after the last one, and when a stop is requested.

    Args:
        run_dir: the run folder.
        every: optimizer steps between checkpoints.
        keep: number of newest checkpoints to keep.
        stop: True if the user asked to stop.
        before_saving: function that the first process calls before each checkpoint, for files that must not be older.
    """

    run_dir: Path
    every: int
    keep: int
    stop: StopSignal
    before_saving: Callable[[], None] | None = None
    _random_states: list[dict[str, Any]] | None = field(default=None, init=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore generators; end a run that was stopped in the evaluation before its first step."""
        if self._random_states is not None:
            set_random_state(self._random_states[rank_in_group()[0]])
        if self._stops(trainer):
            self._save(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The random generators' states on every rank."""
        return {"random": random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the generators' states until training starts."""
        self._random_states = state_dict["random"]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Save a checkpoint when it is due, and end the run when a stop is requested."""
        assert isinstance(pl_module, RunModule)
        step = trainer.global_step
        if self._stops(trainer) or step % self.every == 0 or step == pl_module.num_steps:
            self._save(trainer, pl_module)

    def _stops(self, trainer: pl.Trainer) -> bool:
        """True if any process received a signal, since it may reach a single one, or each at another step."""
        stops = bool(trainer.strategy.reduce_boolean_decision(self.stop.requested, all=False))
        # a signal during this reduction counts at the next one, since it is not reset here
        self.stop.requested = self.stop.requested or stops
        trainer.should_stop = trainer.should_stop or stops
        return stops

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, RunModule)
        path = checkpoint_path(self.run_dir, trainer.global_step)
        with writing(path, first_in=TEMPORARY):
            if trainer.is_global_zero and self.before_saving is not None:
                self.before_saving()
            pl_module.last_checkpoint = save_checkpoint(trainer, path)
        if trainer.is_global_zero:
            prune(self.run_dir, self.keep)


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

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
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
        before, after = lr_factor(self.schedule, self.from_steps), lr_factor(self.schedule, self.to_steps)
        if all(before(step) == after(step) for step in range(done + 1)):
            effect = f"its learning rates are the ones of a run of {self.to_steps} steps"
        else:
            effect = (
                f"the {self.schedule.name} schedule of {self.to_steps} steps applies from there on: the learning rate "
                f"of step {done + 1} is {after(done):.3g} of its peak ({before(done):.3g} as planned before), so the "
                f"result differs from a run that was started with {self.to_steps} steps"
            )
        if trainer.is_global_zero:
            told = "the run is extended from %d to %d steps after step %d; %s"
            log.warning(told, self.from_steps, self.to_steps, done, effect)
