"""Fit one reward model: the Lightning module, the run and its evaluation. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "RewardModelLightning": "rm_optimizer.training.lightning_module",
    "PreferenceDataModule": "rm_optimizer.training.data.in_memory",
    "RunResult": "rm_optimizer.training.folder.result",
    "evaluate_checkpoint": "rm_optimizer.evaluation.saved_model",
    "train_reward_model": "rm_optimizer.training.run",
}
__all__ = ["PreferenceDataModule", "RewardModelLightning", "RunResult", "evaluate_checkpoint", "train_reward_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
