"""The Lightning trainer of a run."""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from rm_optimizer.schema import HardwareConfig
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


def quiet_libraries() -> None:
    """Silence Lightning's start-up notices, and one deprecation warning of torch 2.13 that it causes."""
    # Lightning 2.6 still calls LeafSpec(); harmless until torch removes it.
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)
    for name in ("pytorch_lightning", "lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
