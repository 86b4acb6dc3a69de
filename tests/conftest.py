"""Shared test set-up: one thread, no network, shapes checked at run time."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
from jaxtyping import install_import_hook

CHECKED_ROOMS = (
    "losses",
    "metrics",
    "calibration",
    "pooling",
    "head",
    "reward_model",
    "certificate",
    "export",
    "prefix",
)

install_import_hook([f"rm_optimizer.core.{room}" for room in CHECKED_ROOMS], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none of them is left to one worker at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
