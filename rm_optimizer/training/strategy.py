"""Parallel strategies of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.core.model.sharding import load_whole_weights, shard_like, whole
from rm_optimizer.optim.registry import SHARDED_STRATEGY
from rm_optimizer.schema import HardwareConfig
from rm_optimizer.training.processes import launched_processes

log = logging.getLogger("rm_optimizer")


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks; `RunModule.configure_model` splits the model.

    A checkpoint holds whole tensors in the layout of one device, gathered one at a time on the first rank. So
    `BradleyTerryRM.from_pretrained` and every other strategy can read it. Lightning's own strategy would key the
    optimizer's state by the model's order of parameters, which differs from the order of groups by role.

    Args:
        num_ranks: number of processes over all nodes.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True, so that Lightning passes the optimizer's state to `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights on the first rank, and none on other ranks; every rank must take part."""
        assert self.model is not None
        return self._gathered(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state with whole tensors on the first rank, without tensors elsewhere."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = plain.state_dict()
        return state | {"state": {key: self._gathered(values) for key, values in state["state"].items()}}

    def _gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        gathered = {}
        for name, value in values.items():
            entire = whole(value).cpu() if isinstance(value, Tensor) else value
            if self.is_global_zero:
                gathered[name] = entire
        return gathered

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The file's content on every rank, memory-mapped so that ranks of one machine share it."""
        path = self.broadcast(checkpoint_path)
        content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's shard of each weight."""
        assert self.lightning_module is not None
        load_whole_weights(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's shard of each of the optimizers' states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            # ids number the parameters in the order of the groups
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            shards = {
                key: {
                    name: shard_like(value, parameters[key]) if isinstance(value, Tensor) else value
                    for name, value in values.items()
                }
                for key, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shards})


def strategy_of(hardware: HardwareConfig) -> str | ShardedStrategy:
    """Lightning's name of the strategy, or a `ShardedStrategy` for FSDP2."""
    if hardware.strategy == SHARDED_STRATEGY:
        return ShardedStrategy(hardware.devices * hardware.num_nodes)
    return hardware.strategy


def cluster_plugins() -> list[Any]:
    """Plugin for jobs of SLURM, without Lightning's requeueing, whose checkpoints `resume=auto` cannot read."""
    if not SLURMEnvironment.detect() or TorchElasticEnvironment.detect():
        return []
    return [LightningEnvironment() if launched_processes() is None else SLURMEnvironment(auto_requeue=False)]
