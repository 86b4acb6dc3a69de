"""Options of optimizers and schedules: one dataclass for each registered name."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True)
class OptimizerConfig:
    """What every optimizer has."""

    name: str = MISSING
    lr: float = MISSING
    weight_decay: float = MISSING


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 2019)."""

    name: str = "adamw"
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning-rate factor over the optimizer steps."""

    name: str = MISSING
    warmup_steps: int | None = None
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
