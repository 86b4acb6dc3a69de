"""Optimizers and schedules: one registry, one partition of the parameters, one object to step."""

from __future__ import annotations

from rm_optimizer.optim.algorithms import evaluation_weights, set_train_mode
from rm_optimizer.optim.builders import build_optimizer, register_optimizer
from rm_optimizer.optim.param_groups import GroupRow, describe_groups
from rm_optimizer.optim.registry import OPTIMIZERS, OptimizerInfo, check_compatible
from rm_optimizer.optim.schedules import build_schedule

__all__ = [
    "OPTIMIZERS",
    "GroupRow",
    "OptimizerInfo",
    "build_optimizer",
    "build_schedule",
    "check_compatible",
    "describe_groups",
    "evaluation_weights",
    "register_optimizer",
    "set_train_mode",
]
