"""Callbacks of a run: those that options require, their columns of `metrics.csv`, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, Checkpoint, EarlyStopping, ProgressBar

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import TrainConfig

OWN = {
    Checkpoint: "training.checkpoint_every and training.keep_checkpoints",
    EarlyStopping: "training.early_stopping",
    ProgressBar: "training.progress",
}
"""Lightning callbacks that a run replaces, and the options in their place."""


class RunCallback(pl.Callback):
    """Lightning callback with its own columns in `metrics.csv`, or one that an option enables.

    Attributes:
        option: option that enables it; empty for callbacks of a user.
        columns: name of each metric that it logs, and the column of `metrics.csv` that holds it.
    """

    option: ClassVar[str] = ""
    columns: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def require(self, config: TrainConfig) -> None:
        """Refuse runs that it does not support, before the model is built.

        Raises:
            ConfigError: naming the option.
        """


def require_callbacks(config: TrainConfig, callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that do not support the run, and options whose callback was not passed.

    Raises:
        TypeError: if one is not a Lightning callback.
        ConfigError: naming the option.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks must be Lightning callbacks, got {callback!r}")
        for kind, options in OWN.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise ConfigError(f"a run does the work of {name} itself; set {options}, and leave out the callback")
    ours = [callback for callback in callbacks if isinstance(callback, RunCallback)]
    passed = {callback.option for callback in ours}
    for option, is_on in (
        ("training.calibration.enabled", config.training.calibration.enabled),
        ("training.hessian", config.training.hessian.is_on),
        ("publish.url", config.publish.url is not None),
    ):
        if is_on and option not in passed:
            raise ConfigError(
                f"{option} needs a callback that train_reward_model was not given; start the run with rm-opt train, "
                "or pass callbacks=rm_optimizer.train.option_callbacks(config)"
            )
    for callback in ours:
        callback.require(config)


def columns_of(callbacks: Sequence[Callback]) -> dict[str, str]:
    """Metric names and columns of `metrics.csv` that these callbacks fill."""
    ours = (callback.columns for callback in callbacks if isinstance(callback, RunCallback))
    return {name: column for columns in ours for name, column in columns.items()}
