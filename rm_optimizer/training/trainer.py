"""The Lightning trainer of a run, and its loggers."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import HardwareConfig, LoggerConfig
from rm_optimizer.schema.config import WandbMode
from rm_optimizer.training.callbacks.loop import StepProgress
from rm_optimizer.training.strategy import cluster_plugins, strategy_of


def build_trainer(
    hardware: HardwareConfig, loggers: list[Logger], callbacks: list[Callback], num_steps: int
) -> pl.Trainer:
    """Lightning trainer that only drives steps; evaluation, checkpoints and logging are this package's callbacks."""
    quiet_libraries()
    return pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.num_nodes,
        strategy=strategy_of(hardware),
        plugins=cluster_plugins(),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=num_steps,
        max_epochs=1,
        logger=loggers,
        callbacks=callbacks,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, StepProgress) for callback in callbacks),
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )


def build_loggers(config: LoggerConfig, run_dir: Path) -> list[Logger]:
    """TensorBoard and W&B as configured."""
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
        ConfigError: saying how to log in or to stay offline.
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
    """End the W&B run, so that its files are whole; Lightning leaves it open."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def quiet_libraries() -> None:
    """Keep Lightning's start-up notices off the terminal, and one deprecation of torch 2.13 that it meets."""
    # Lightning 2.6 still calls LeafSpec(); harmless until torch removes it.
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)
    for name in ("pytorch_lightning", "lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
