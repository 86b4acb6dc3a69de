"""Publishing of weights to a reward server while training; the server gets the weights that evaluations use."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import pytorch_lightning as pl
from torch import Tensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.sharding import is_sharded, whole
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.optim import evaluation_weights
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.publish import OnFailure, PublishConfig, RewardModelTrainingMode
from rm_optimizer.training.callbacks.run_callback import RunCallback
from rm_optimizer.training.folder.record import RunRecord
from rm_optimizer.training.lightning_module import RunModule

RUN_DIGITS = 8
"""Digits of a run's id that the names of its weights begin with."""
log = logging.getLogger("rm_optimizer")


class Publisher(Protocol):
    """Interface that sends new weights to a server."""

    def publish(self, weights: BradleyTerryRM | Mapping[str, Tensor], version: str) -> object:
        """Publish the weights, and return once they are served under that name.

        Raises:
            RMOptimizerError: if the server does not accept them.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


OpenPublisher: TypeAlias = Callable[[PublishConfig], Publisher]
"""Function that connects to the server in the options; raises if it does not answer."""


def require_publishable(mode: RewardModelTrainingMode, config: TrainConfig) -> None:
    """Refuse a mode that does not send all trained weights.

    Raises:
        ConfigError: naming the option.
    """
    adapter = config.adapter.kind
    if mode is RewardModelTrainingMode.lora and adapter is AdapterKind.none:
        raise ConfigError("publish.mode=lora sends an adapter, but adapter=none; use publish.mode=full or adapter=lora")
    if mode is RewardModelTrainingMode.head_only and adapter is not AdapterKind.none:
        raise ConfigError(f"publish.mode=head_only omits adapter={adapter.value}; use publish.mode=lora or full")
    if config.hardware.strategy == "fsdp2" and (
        mode is not RewardModelTrainingMode.full or adapter is not AdapterKind.none
    ):
        raise ConfigError("hardware.strategy=fsdp2 can publish only with publish.mode=full and adapter=none; set both")


class PublishWeights(RunCallback):
    """Callback that publishes the weights every `every_n_steps` steps and after the last, as version `RUN-step-N`.

    `RUN` begins with the run's id, so that two runs never publish under one name. A resumed run uses new names, since
    its weights may differ from the first ones. Only the first rank connects to the server. Optimizers that
    train and evaluate different weights publish those that they evaluate. The run itself does not change, also if the
    server refuses the weights.

    Args:
        config: interval of the updates, and the effect of a failure.
        open_publisher: function that connects to the server, called before the model is built and before the first
            step.
    """

    option = "publish.url"

    def __init__(self, config: PublishConfig, open_publisher: OpenPublisher) -> None:
        self.config = config
        self._run = ""
        self.open_publisher = open_publisher
        self._publisher: Publisher | None = None

    def require(self, config: TrainConfig) -> None:
        """Refuse a mode that does not send all trained weights, and an address where no server answers."""
        require_publishable(self.config.mode, config)
        self.open_publisher(self.config).close()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect to the server."""
        if trainer.is_global_zero:
            record = pl_module.record
            assert isinstance(record, RunRecord), "a run has a record before its first step"
            self._run = run_name(record.run_id, trainer.global_step)
            self._publisher = self.open_publisher(self.config)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Publish when it is due."""
        assert isinstance(pl_module, RunModule)
        step = trainer.global_step
        if step % self.config.every_n_steps and step != pl_module.num_steps:
            return
        try:
            with evaluation_weights(trainer.optimizers[0]):
                weights: BradleyTerryRM | Mapping[str, Tensor] = pl_module.model
                if is_sharded(pl_module.model):  # gathered from the ranks, so every rank takes part
                    weights = {name: whole(value).cpu() for name, value in pl_module.model.model.state_dict().items()}
                if self._publisher is not None:
                    self._publisher.publish(weights, f"{self._run}-step-{step}")
        except RMOptimizerError as error:
            if self.config.on_failure is OnFailure.error:
                raise
            log.warning("%s; training continues (publish.on_failure=warn)", error)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the connection of a run that fails, which Lightning does not tear down."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the connection."""
        self._close()

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


def run_name(run_id: str, first_step: int) -> str:
    """Beginning of the names of a run's versions; a new one each time that the run is resumed after a step."""
    return run_id[:RUN_DIGITS] + (f"-{secrets.token_hex(2)}" if first_step else "")
