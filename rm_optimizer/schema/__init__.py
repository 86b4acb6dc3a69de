"""Typed options and where their presets live. Imports no torch."""

from __future__ import annotations

from rm_optimizer.schema.compose import compose, config_root, typed
from rm_optimizer.schema.config import (
    BatchingConfig,
    HardwareConfig,
    LoggerConfig,
    LossConfig,
    ModelConfig,
    TrainConfig,
    TrainingConfig,
)
from rm_optimizer.schema.data import DataConfig
from rm_optimizer.schema.rlhf import RLHFConfig

__all__ = [
    "BatchingConfig",
    "DataConfig",
    "HardwareConfig",
    "LoggerConfig",
    "LossConfig",
    "ModelConfig",
    "RLHFConfig",
    "TrainConfig",
    "TrainingConfig",
    "compose",
    "config_root",
    "typed",
]
