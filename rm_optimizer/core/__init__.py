"""Rewards from preferences: pairs, tokens, losses, metrics and the model itself. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "PreferencePair": "rm_optimizer.core.pairs.pair",
    "BaseRewardModel": "rm_optimizer.core.pairs.pair",
    "BradleyTerryRM": "rm_optimizer.core.model.reward_model",
}
__all__ = ["BaseRewardModel", "BradleyTerryRM", "PreferencePair"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
