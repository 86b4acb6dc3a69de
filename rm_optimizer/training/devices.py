"""Which processes a run is made of: strategy and cluster from `hardware` and the environment."""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from rm_optimizer.optim.compatibility import SHARDED_STRATEGY
from rm_optimizer.schema import HardwareConfig
from rm_optimizer.training.sharded_strategy import ShardedStrategy


def strategy_of(hardware: HardwareConfig) -> str | ShardedStrategy:
    """What Lightning calls the strategy, or ours for FSDP2."""
    if hardware.strategy == SHARDED_STRATEGY:
        return ShardedStrategy(hardware.devices * hardware.num_nodes)
    return hardware.strategy


def cluster_plugins() -> list[Any]:
    """Under SLURM alone, Lightning without its own requeueing, whose checkpoints `resume=auto` does not know."""
    is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if is_slurm else []
