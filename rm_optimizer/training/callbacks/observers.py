"""What a run may be watched with beyond its losses, and the parts of that which live on other floors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.curvature_reading import MeasureCurvature
from rm_optimizer.schema import HardwareConfig, TrainConfig
from rm_optimizer.training.callbacks.calibration import CALIBRATION_COLUMNS, CalibrationCallback, DrawReliability
from rm_optimizer.training.callbacks.curvature import CURVATURE_COLUMNS, HessianCallback
from rm_optimizer.training.callbacks.loop import Evaluation
from rm_optimizer.training.callbacks.memory_profile import PROFILE_COLUMNS, PROFILE_ROWS, MemoryProfile
from rm_optimizer.training.callbacks.publishing import OpenPublisher, PublishWeights, require_publishable
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.folder.recorder import COLUMNS, MetricsCSV


@dataclass(frozen=True)
class Observers:
    """Functions that a run needs for some of its options and that training does not hold itself.

    Args:
        draw_reliability: draws a reliability picture, for `training.calibration.enabled`.
        measure_curvature: makes a measurement of the loss's curvature, for `training.hessian.every`.
        open_publisher: connects to the reward server of `publish.url`.
    """

    draw_reliability: DrawReliability | None = None
    measure_curvature: MeasureCurvature | None = None
    open_publisher: OpenPublisher | None = None

    def require(self, config: TrainConfig) -> None:
        """Refuse options whose function was not passed, or cannot measure such a run.

        Raises:
            ConfigError: naming the option.
        """
        if config.training.hessian.every is not None:
            _require_movable_weights(config.hardware)
        require_publishable(config)
        for option, is_on, name in (
            ("training.calibration.enabled", config.training.calibration.enabled, "draw_reliability"),
            ("training.hessian.every", config.training.hessian.every is not None, "measure_curvature"),
            ("publish.url", config.publish.url is not None, "open_publisher"),
        ):
            if is_on and getattr(self, name) is None:
                raise ConfigError(
                    f"{option} needs a function that train_reward_model was not given; "
                    f"start the run with rm-opt train, or pass observers=Observers({name}=...)"
                )
        if config.publish.url is not None and self.open_publisher is not None:
            self.open_publisher(config.publish).close()  # a wrong address is told before the model is built


def _require_movable_weights(hardware: HardwareConfig) -> None:
    """Refuse runs whose gradient cannot be had at weights beside the model's: compiled backbones, sharded weights."""
    for is_on, option, instead in (
        (hardware.compile, "hardware.compile=true", "hardware.compile=false"),
        (hardware.strategy.startswith("fsdp"), f"hardware.strategy={hardware.strategy}", "hardware=ddp"),
    ):
        if is_on:
            raise ConfigError(
                f"training.hessian.every does not go with {option}: it takes gradients at copies of the weights; "
                f"set {instead} or training.hessian.every=null"
            )


def watching(
    config: TrainConfig, observers: Observers, datamodule: PreferenceDataModule, evaluation: Evaluation, run_dir: Path
) -> list[Callback]:
    """The run's evaluations among what else the options watch, in the order in which they must be called.

    Args:
        config: the run's options.
        observers: functions of other floors; `Observers.require` has passed them.
        datamodule: the run's pairs.
        evaluation: the run's evaluations.
        run_dir: the run folder.
    """
    callbacks: list[Callback] = [MemoryProfile(run_dir)] if config.profile_memory else []
    callbacks.append(evaluation)
    if config.training.calibration.enabled and observers.draw_reliability is not None:
        draw = observers.draw_reliability
        callbacks.append(CalibrationCallback(evaluation, run_dir, config.training.calibration, draw))
    if config.training.hessian.every is not None and observers.measure_curvature is not None:
        measure = observers.measure_curvature
        callbacks.append(HessianCallback(datamodule, config.training.hessian, config.loss, measure))
    if config.publish.url is not None and observers.open_publisher is not None:
        callbacks.append(PublishWeights(config.publish, observers.open_publisher))
    return callbacks


def csv_loggers(config: TrainConfig, run_dir: Path, resume_step: int | None) -> list[Logger]:
    """`metrics.csv` with a column for everything watched that no clock enters, and `profile.csv` for the rest.

    Args:
        config: the run's options.
        run_dir: the run folder.
        resume_step: rows after this step are dropped from earlier files; None starts new ones.
    """
    columns = dict(COLUMNS)
    if config.training.calibration.enabled:
        columns |= CALIBRATION_COLUMNS
    if config.training.hessian.every is not None:
        columns |= CURVATURE_COLUMNS
    loggers: list[Logger] = [MetricsCSV(run_dir, resume_step, columns)]
    if config.profile_memory:
        loggers.append(MetricsCSV(run_dir, resume_step, PROFILE_COLUMNS, PROFILE_ROWS))
    return loggers
