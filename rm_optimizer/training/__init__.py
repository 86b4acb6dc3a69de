"""Fit one reward model: the Lightning module, the data module and the run. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.training.callbacks.run_callback import RunCallback as RunCallback
    from rm_optimizer.training.data.in_memory import PreferenceDataModule as PreferenceDataModule
    from rm_optimizer.training.folder.record import RunResult as RunResult
    from rm_optimizer.training.lightning_module import RewardModelLightning as RewardModelLightning
    from rm_optimizer.training.run import train_reward_model as train_reward_model

export_lazily(globals())
