"""Seconds of the optimizer steps of a run."""

from __future__ import annotations

import time
from typing import Any

import pytorch_lightning as pl

from rm_optimizer.training.callbacks.loop import evaluation_of


class StepClock(pl.Callback):
    """Callback that measures the time of each step without evaluations.

    Attributes:
        steps: seconds of each step.
        steps_per_epoch: number of optimizer steps of an epoch; 0 before the first step.
        evaluating: seconds of all evaluations until the end of the last step.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.steps_per_epoch = 0
        self.evaluating = 0.0
        self._began = self._evaluated = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start timing the step."""
        evaluation = evaluation_of(trainer)
        self.steps_per_epoch = evaluation.datamodule.steps_per_epoch
        self._evaluated, self._began = evaluation.seconds, time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step."""
        elapsed, self.evaluating = time.perf_counter() - self._began, evaluation_of(trainer).seconds
        self.steps.append(elapsed - (self.evaluating - self._evaluated))
