"""Opening and closing of the loggers in the options: TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import LoggerConfig
from rm_optimizer.schema.config import WandbMode


@contextmanager
def open_loggers(config: LoggerConfig, run_dir: Path, options: Mapping[str, Any]) -> Iterator[list[Logger]]:
    """Loggers of a run, closed after the block; W&B shows the run's options as its config.

    Args:
        config: the loggers' options.
        run_dir: the run folder.
        options: options of the whole run, as `options.json` holds them.
    """
    loggers = build_loggers(config, run_dir)
    try:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams(dict(options))
        yield loggers
    finally:
        close_loggers(loggers)


def build_loggers(config: LoggerConfig, run_dir: Path) -> list[Logger]:
    """TensorBoard and W&B as configured.

    Args:
        config: the loggers' options.
        run_dir: folder of the run or analysis, in which they write.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(str(run_dir), name="", version="tensorboard"))
    if config.wandb:
        wandb = WandbLogger(
            project=config.project,
            name=config.name or run_dir.name,
            group=config.group,
            tags=config.tags,
            save_dir=str(run_dir),
            mode=config.wandb_mode.value,
        )
        loggers.append(wandb)
    return loggers


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


def close_loggers(loggers: list[Logger]) -> None:
    """End the W&B run, so that its files are complete; Lightning leaves it open."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
