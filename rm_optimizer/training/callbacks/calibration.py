"""Calibration while training: error, temperature and a reliability diagram of evaluations, for every logger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.records.files import writing
from rm_optimizer.schema.config import CalibrationConfig
from rm_optimizer.training.callbacks.evaluation import evaluation_of
from rm_optimizer.training.callbacks.run_callback import RunCallback
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.loggers import log_figure

DrawReliability = Callable[[PairwiseMetrics, Path], Path]
"""Function that draws the reliability diagram of one evaluation as a PNG file and returns its path."""

CALIBRATION_COLUMNS = {
    "calibration/ece": "calibration_ece",
    "calibration/ece_mass": "calibration_ece_mass",
    "calibration/ece_noise_floor": "calibration_ece_noise_floor",
    "calibration/temperature": "calibration_temperature",
    "calibration/nll_at_temperature": "calibration_nll_at_temperature",
}
"""Columns of `metrics.csv` by metric name, if calibration is logged."""

FIGURES = "figures"
"""Folder of the figures in the run folder."""


class CalibrationCallback(RunCallback):
    """Callback that logs the calibration of the run's evaluations.

    It comes after `Evaluation` among the callbacks and uses its last result, so that no pair is scored again. Figures
    are written to the run folder's `figures/`.

    Args:
        config: selection of the evaluations.
        draw: function that draws the reliability diagram.
    """

    option = "training.calibration.enabled"
    columns: ClassVar = CALIBRATION_COLUMNS

    def __init__(self, config: CalibrationConfig, draw: DrawReliability) -> None:
        self.config = config
        self.draw = draw

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the untrained model's calibration, if it was evaluated."""
        self._log_if_due(trainer, is_last=False)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the calibration of this step's evaluation, if there was one and it is selected."""
        assert isinstance(pl_module, RunModule)
        self._log_if_due(trainer, is_last=trainer.should_stop or trainer.global_step == pl_module.num_steps)

    def _log_if_due(self, trainer: pl.Trainer, *, is_last: bool) -> None:
        evaluation = evaluation_of(trainer)
        latest, step = evaluation.latest, trainer.global_step
        if latest is None or latest.step != step or not trainer.is_global_zero:
            return
        if not is_last and (step // evaluation.every) % self.config.every:
            return
        for logger in trainer.loggers:
            logger.log_metrics(calibration_values(latest.metrics), step=step)
        path = evaluation.run_dir / FIGURES / f"reliability-step-{step:08d}.png"
        with writing(path):
            log_figure(trainer.loggers, "calibration/reliability", self.draw(latest.metrics, path), step)


def calibration_values(metrics: PairwiseMetrics) -> dict[str, float]:
    """Calibration numbers of an evaluation, as logged; temperature and its NLL only if a finite one is best."""
    values = {
        "calibration/ece": metrics.ece.value,
        "calibration/ece_mass": metrics.ece_mass,
        "calibration/ece_noise_floor": metrics.ece_noise_floor,
    }
    fit = metrics.temperature
    if fit.temperature is not None and fit.nll is not None:
        values |= {"calibration/temperature": fit.temperature, "calibration/nll_at_temperature": fit.nll}
    return values
