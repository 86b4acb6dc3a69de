"""Figures, histograms and tables for the loggers that can show them; other loggers get scalars only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from rm_optimizer.records.quoting import markdown_table


def log_figure(loggers: Iterable[Logger], name: str, png: Path, step: int) -> None:
    """Log a figure to TensorBoard and Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the figure, as `stage/name`.
        png: file of the figure.
        step: optimizer step it belongs to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(name, imread(png)[..., :3], step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [str(png)], step)


def log_histogram(loggers: Iterable[Logger], name: str, values: Float[np.ndarray, " values"], step: int) -> None:
    """Log a histogram of values to TensorBoard and Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the values, as `stage/name`.
        values: the values, all finite.
        step: optimizer step they belong to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, step)
        elif isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({name: wandb.Histogram(values), "trainer/global_step": step})


def log_table(loggers: Iterable[Logger], name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log a table to TensorBoard, as text, and to Weights & Biases.

    Args:
        loggers: loggers of the run; those for numbers only are skipped.
        name: name of the table, as `stage/name`.
        rows: values by column, the same columns in each.
        step: optimizer step it belongs to.
    """
    columns = list(rows[0]) if rows else []
    cells = [[row[column] for column in columns] for row in rows]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            text = markdown_table(columns, [list(map(str, line)) for line in cells])
            logger.experiment.add_text(name, text, step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(name, columns, cells, step=step)
