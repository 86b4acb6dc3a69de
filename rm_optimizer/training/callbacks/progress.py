"""Progress of a run: a bar in a terminal, or else a line every minute (nohup, SLURM, CI)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from rich.console import Console

from rm_optimizer.training.lightning_module import RunModule

log = logging.getLogger("rm_optimizer")

SECONDS = 60.0
"""Seconds between two lines."""


def shows_bars() -> bool:
    """True if standard output is a terminal or a notebook, where a bar can be redrawn."""
    console = Console()
    return console.is_terminal or console.is_jupyter


class ProgressLines(pl.Callback):
    """Callback that logs a line every `seconds`: step, loss, accuracy, speed and time left, or an evaluation's pairs.

    Args:
        seconds: seconds between two lines.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.clock = clock
        self._last = self._started = clock()
        self._first_step = self._pairs_before = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the steps."""
        assert isinstance(pl_module, RunModule)
        self._started, self._first_step = self.clock(), trainer.global_step
        self._pairs_before = pl_module.pairs_seen

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step if a line is due."""
        assert isinstance(pl_module, RunModule)
        if trainer.is_global_zero and self._is_due():
            log.info("%s", self._step_line(trainer.global_step, pl_module))

    def evaluated(self, total: int, done: int) -> None:
        """Log the progress of an evaluation if a line is due.

        Args:
            total: pairs to score.
            done: pairs scored.
        """
        if self._is_due():
            log.info("evaluation: %d of %d pairs", done, total)

    def _is_due(self) -> bool:
        now = self.clock()
        if now - self._last < self.seconds:
            return False
        self._last = now
        return True

    def _step_line(self, step: int, module: RunModule) -> str:
        seconds = max(self.clock() - self._started, 1e-9)
        left = seconds / max(step - self._first_step, 1) * (module.num_steps - step)
        loss, accuracy = (module.step_metrics.get(f"train/{name}", float("nan")) for name in ("loss", "accuracy"))
        speed = (module.pairs_seen - self._pairs_before) / seconds
        return (
            f"step {step} of {module.num_steps}: loss {loss:.4f}, accuracy {accuracy:.3f}, "
            f"{speed:.1f} pairs/s with evaluations, {duration(left)} left"
        )


class StepProgress(RichProgressBar):
    """Lightning's bar over the optimizer steps of the run, with metrics of the step and of the last validation."""

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Training loss and accuracy of the step, and the last validation accuracy."""
        assert isinstance(pl_module, RunModule)
        shown = {"loss": "train/loss", "acc": "train/accuracy"}
        metrics: dict[str, int | str | float | dict[str, float]]
        metrics = {name: f"{pl_module.step_metrics.get(key, float('nan')):.3f}" for name, key in shown.items()}
        return metrics | {"val": f"{pl_module.validation_metrics.get('val/accuracy', float('nan')):.3f}"}

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


def duration(seconds: float) -> str:
    """Duration in words, with its two largest units.

    Example:
        >>> duration(59.6), duration(61), duration(7384)
        ('1 min 0 s', '1 min 1 s', '2 h 3 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
