"""Public address of data sets and loaders of preference pairs. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.dataset import (
        PreferenceDataset,
        TrainVal,
        load_pairs,
        load_training_data,
        prompt_ids,
        require_disjoint_prompts,
    )
    from rm_optimizer.core.rows.bad_rows import SkippedRow
    from rm_optimizer.core.streaming.dataset import RayPreferenceDataset
    from rm_optimizer.core.tokens.loader import create_dataloader

_DATASET = "rm_optimizer.core.pairs.dataset"
_HOME = {
    "PreferenceDataset": _DATASET,
    "RayPreferenceDataset": "rm_optimizer.core.streaming.dataset",
    "SkippedRow": "rm_optimizer.core.rows.bad_rows",
    "TrainVal": _DATASET,
    "create_dataloader": "rm_optimizer.core.tokens.loader",
    "load_pairs": _DATASET,
    "load_training_data": _DATASET,
    "prompt_ids": _DATASET,
    "require_disjoint_prompts": _DATASET,
}
__all__ = [
    "PreferenceDataset",
    "RayPreferenceDataset",
    "SkippedRow",
    "TrainVal",
    "create_dataloader",
    "load_pairs",
    "load_training_data",
    "prompt_ids",
    "require_disjoint_prompts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
