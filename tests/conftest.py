"""Shared test set-up: one thread, no network, shapes checked at run time."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

from jaxtyping import install_import_hook

install_import_hook(
    ["rm_optimizer.core.losses", "rm_optimizer.core.metrics", "rm_optimizer.core.calibration"], "beartype.beartype"
)
