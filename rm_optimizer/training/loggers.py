"""Loggers in addition to metrics.csv: TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from rm_optimizer.core.metrics.pairwise import ESTIMATES, PairwiseMetrics
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.records.quoting import markdown_table
from rm_optimizer.schema import LoggerConfig
from rm_optimizer.schema.config import WandbMode
from rm_optimizer.training.folder.record import RunResult


@contextmanager
def open_loggers(config: LoggerConfig, folder: Path, options: Mapping[str, Any]) -> Iterator[list[Logger]]:
    """TensorBoard and W&B as configured, closed after the block; W&B shows the options as its config.

    Args:
        config: the loggers' options.
        folder: folder of the run or analysis, in which they write.
        options: options of the whole run or analysis.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(str(folder), name="", version="tensorboard"))
    wandb = None
    if config.wandb:
        wandb = WandbLogger(
            project=config.project,
            name=config.name or folder.name,
            group=config.group,
            tags=config.tags,
            save_dir=str(folder),
            mode=config.wandb_mode.value,
        )
        loggers.append(wandb)
    try:
        if wandb is not None:
            wandb.log_hyperparams(dict(options))
        yield loggers
    finally:
        if wandb is not None:
            wandb.experiment.finish()  # so that its files are complete; Lightning leaves it open


def require_wandb_key(config: LoggerConfig) -> None:
    """Refuse W&B online without a key, before a model is loaded.

    Raises:
        ConfigError: if there is no key.
    """
    if not config.wandb or config.wandb_mode != WandbMode.online or os.environ.get("WANDB_API_KEY"):
        return
    import wandb

    if not wandb.api.api_key:
        raise ConfigError(
            "logger.wandb_mode=online needs a W&B API key, and there is none on this machine; run wandb login, set "
            "WANDB_API_KEY, or write logger.wandb_mode=offline"
        )


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


def _scores(group: PairwiseMetrics) -> dict[str, float | int | None]:
    accuracy = group.accuracy
    interval = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high}
    return {"pairs": group.num_pairs, **interval, "nll": group.nll.value}


def log_outcome(loggers: Iterable[Logger], result: RunResult, *, log_model: bool) -> None:
    """Log the metrics of the exported weights with their intervals, and those of each group.

    Args:
        loggers: loggers of the run. The metrics and the model go to W&B only, the tables to TensorBoard too.
        result: the run's result.
        log_model: True to log the exported model as an artifact by reference; `wandb sync` uploads its files.
    """
    loggers = list(loggers)
    for column, groups in result.metrics.groups.items():
        rows = [{column: name} | _scores(group) for name, group in groups.items()]
        log_table(loggers, f"best/by_{column}", rows, result.best_step)
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(_summary(result))
            if log_model:
                _log_model(logger, result)


def _summary(result: RunResult) -> dict[str, float | int | str | None]:
    estimates = {name: getattr(result.metrics, name) for name in ESTIMATES}
    values = {f"best/{name}": estimate.value for name, estimate in estimates.items()}
    ends = {
        f"best/{name}_{end}": getattr(estimate, end) for name, estimate in estimates.items() for end in ("low", "high")
    }
    return values | ends | {"best/step": result.best_step, "status": result.status.value}


def _log_model(logger: WandbLogger, result: RunResult) -> None:
    import wandb

    metadata = {"step": result.best_step, "monitor": result.monitor, "accuracy": result.metrics.accuracy.value}
    artifact = wandb.Artifact(f"model-{result.run_id}", type="model", metadata=metadata)
    artifact.add_dir(str(Path(result.run_dir) / BEST_FOLDER), policy="immutable")
    logger.experiment.log_artifact(artifact, aliases=["best"])
