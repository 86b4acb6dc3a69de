"""Typed options and where their presets live. Imports no torch. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.schema.composition import compose as compose
    from rm_optimizer.schema.composition import config_root as config_root
    from rm_optimizer.schema.composition import typed as typed
    from rm_optimizer.schema.config import BatchingConfig as BatchingConfig
    from rm_optimizer.schema.config import HardwareConfig as HardwareConfig
    from rm_optimizer.schema.config import LoggerConfig as LoggerConfig
    from rm_optimizer.schema.config import LossConfig as LossConfig
    from rm_optimizer.schema.config import ModelConfig as ModelConfig
    from rm_optimizer.schema.config import TrainConfig as TrainConfig
    from rm_optimizer.schema.config import TrainingConfig as TrainingConfig
    from rm_optimizer.schema.data import DataConfig as DataConfig
    from rm_optimizer.schema.rlhf import RLHFConfig as RLHFConfig

export_lazily(globals())
