"""Reward model serving: wire types, engines, the server, its client and live weight updates.

Modules are imported by name; the server's need the extra `serve`. The public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "AsyncRewardClient": "rm_optimizer.serving.client.async_client",
    "RMPublisherAdapter": "rm_optimizer.serving.weights.publisher",
    "RewardClient": "rm_optimizer.serving.client.client",
    "create_rm_publisher": "rm_optimizer.serving.weights.publisher",
    "trl_reward": "rm_optimizer.serving.client.reward_function",
}
__all__ = ["AsyncRewardClient", "RMPublisherAdapter", "RewardClient", "create_rm_publisher", "trl_reward"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
