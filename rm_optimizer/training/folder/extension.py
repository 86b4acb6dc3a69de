"""Extension of a resumed run: its learning rate follows the schedule of the new length from then on."""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from torch.optim.lr_scheduler import LambdaLR

from rm_optimizer.optim.schedules import lr_factor
from rm_optimizer.schema.optimizers import ScheduleConfig

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
