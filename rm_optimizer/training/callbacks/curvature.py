"""Curvature while training: the loss's top eigenvalue and trace on fixed pairs, without an effect on the run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import nn

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import CurvatureMeasurement, MeasureCurvature, MeasurementFactory, draw_pairs
from rm_optimizer.optim import evaluation_weights
from rm_optimizer.optim.stability import stability_of
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.config import HessianConfig
from rm_optimizer.training.callbacks.run_callback import RunCallback
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.lightning_module import RunModule

log = logging.getLogger("rm_optimizer")

CURVATURE_COLUMNS = {
    f"curvature/{name}": f"curvature_{name}"
    for name in (
        *("top_eigenvalue", "top_eigenvalue_residual", "trace", "trace_standard_error"),
        *("preconditioned_sharpness", "stability_limit", "num_products"),
    )
}
"""Columns of `metrics.csv` by metric name, if curvature is measured; its seconds go to the other loggers only."""


SHARE = 0.1
"""Largest share of a run's time for measurements without a given spacing."""
PLANNED_SHARE = 0.09
"""Planned share, by counted operations. The difference allows for the machine's actual speed."""
VECTOR_TOKENS = 400
"""Cost of the vector operations of a measurement for each gradient, as a number of tokens whose gradient takes as long.

It was measured on one thread of a CPU, in float32. The fewer tokens a step has, the larger is its share.
"""


@dataclass
class MeasurementPlan:
    """Steps of evenly spaced measurements that take `PLANNED_SHARE` of a run, counted and not timed.

    Therefore the same command measures at the same steps. The first measurements cost more than later ones, and so does
    one whose eigenvector has changed much. After each measurement the rest of the share is divided again. The last
    measurement is at the end of the run.

    Args:
        start: steps taken before.
        num_steps: steps of the whole run.
        spent: cost of the measurements so far, in steps.
        due: step of the next measurement.
    """

    start: int
    num_steps: int
    spent: float = 0.0
    due: int = 0

    def left(self, share: float) -> float:
        """Rest of a share of the run, in steps; negative if measurements took more."""
        return share / (1 - share) * (self.num_steps - self.start) - self.spent

    def taken(self, step: int, cost: float, next_cost: float) -> None:
        """Count a measurement and plan the next.

        Args:
            step: step of the measurement.
            cost: its cost, in steps.
            next_cost: expected cost of each further one, in steps.
        """
        self.spent += cost
        count = max(1, int(self.left(PLANNED_SHARE) / next_cost))
        self.due = step + max(1, math.ceil((self.num_steps - step) / count))


def costs_in_steps(measurement: CurvatureMeasurement, pairs_a_step: float) -> tuple[float, float]:
    """Cost of a measurement and of the next one, in steps: gradients of its pairs, and the vector operations with each.

    Args:
        measurement: the measurement.
        pairs_a_step: pairs of a step in this process.
    """
    steps_a_gradient = measurement.num_pairs / pairs_a_step * (1 + VECTOR_TOKENS / measurement.num_tokens)
    return steps_a_gradient * measurement.num_gradients, steps_a_gradient * measurement.num_gradients_next


class HessianCallback(RunCallback):
    """Callback that measures the Hessian of the training loss on the same pairs, at the start and at later steps.

    Without a number of steps, `MeasurementPlan` spaces the measurements. A resumed run then measures after its first
    step.

    The loss is the run's own, in evaluation mode (no dropout), at the weights of an evaluation. For an optimizer that
    evaluates other weights than it trains (schedule-free), these are the averages. Generators, gradients and training
    modes are restored exactly, so that a run with this callback takes the same steps as one without it. Every rank
    measures the same pairs, so that none waits for another in a reduction.

    Args:
        config: interval of the measurements and number of pairs.
        factory: function that creates a measurement of the model on the drawn pairs.
    """

    option = "training.hessian"
    columns: ClassVar = CURVATURE_COLUMNS

    def __init__(self, config: HessianConfig, factory: MeasurementFactory) -> None:
        self.config = config
        self.factory = factory
        self.seconds = 0.0
        self.num_measured = 0
        self.num_pairs = 0
        self._started = 0.0
        self._measure_curvature: MeasureCurvature | None = None
        self._plan = MeasurementPlan(0, 1)

    def require(self, config: TrainConfig) -> None:
        """Refuse runs that cannot compute gradients at copies of the weights: compiled backbones, sharded weights."""
        hardware = config.hardware
        for is_on, option, instead in (
            (hardware.compile, "hardware.compile=true", "hardware.compile=false"),
            (hardware.strategy.startswith("fsdp"), f"hardware.strategy={hardware.strategy}", "hardware=ddp"),
        ):
            if is_on:
                raise ConfigError(
                    f"training.hessian cannot be combined with {option}: it needs gradients at copies of the weights; "
                    f"set {instead}, or training.hessian.enabled=false and training.hessian.every=null"
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the untrained model."""
        assert isinstance(pl_module, RunModule)
        self._started, step = time.perf_counter(), trainer.global_step
        self._plan = MeasurementPlan(step, pl_module.num_steps, due=step + 1)
        if step == 0:
            self._measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Measure when it is due."""
        step, every = trainer.global_step, self.config.every
        if step == self._plan.due if every is None else step % every == 0:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the cost of the measurements."""
        log.info(
            "curvature: %d measurements on %d pairs took %.1f s, %.1f %% of the training time",
            self.num_measured,
            self.num_pairs,
            self.seconds,
            100 * self._share(),
        )
        if self.config.every is None and self._plan.left(SHARE) >= 0 and self._share() > SHARE:
            outside = time.perf_counter() - self._started - self.seconds
            num_steps = trainer.global_step - self._plan.start
            log.warning(
                "curvature took more than %.0f%% of the time: a measurement here takes longer than the count of "
                "gradients and tokens by which measurements are spaced; training.hessian.every=%d keeps to it",
                100 * SHARE,
                math.ceil(self.seconds / self.num_measured * num_steps / outside * (1 - SHARE) / SHARE),
            )

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, RunModule)
        started, model = time.perf_counter(), pl_module.model
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, PreferenceDataModule), "a run has its pairs"
        with undisturbed(model), torch.enable_grad(), evaluation_weights(trainer.optimizers[0]):
            model.eval()
            if self._measure_curvature is None:
                sample = draw_pairs(  # by the run's seed, without a global generator
                    model,
                    data.data.train.pairs,
                    self.config.num_pairs,
                    data.seed,
                    token_budget=data.batching.micro_token_budget,
                    fewest=1,
                    tokenized=data.train_tokens,
                )
                self.num_pairs = sample.num_pairs
                batches: list[AnyPairBatch] = [batch.to(model.device) for batch in sample.batches]
                self._measure_curvature = self.factory(model, batches, pl_module.loss_config)
            stability = stability_of(trainer.optimizers[0])
            by_parameter, scales = stability.scales, None
            if by_parameter is not None:
                scales = {name: by_parameter[p] for name, p in model.named_parameters() if p in by_parameter}
            measurement = self._measure_curvature(scales)
        costs = costs_in_steps(measurement, data.pairs_a_step / trainer.world_size)
        self._plan.taken(trainer.global_step, *costs)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self.num_measured += 1
        values = curvature_values(measurement) | {
            "curvature/stability_limit": math.nan if stability.limit is None else stability.limit,
            "curvature/seconds": seconds,
            "curvature/share_of_training_time": self._share(),
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _share(self) -> float:
        return self.seconds / max(time.perf_counter() - self._started, 1e-9)


def curvature_values(measurement: CurvatureMeasurement) -> dict[str, float]:
    """The numbers of a measurement, as logged; what is unknown is NaN."""
    error, sharpness = measurement.trace.standard_error, measurement.preconditioned_sharpness
    return {
        "curvature/top_eigenvalue": measurement.top_eigenvalue,
        "curvature/top_eigenvalue_residual": measurement.residual,
        "curvature/trace": measurement.trace.value,
        "curvature/trace_standard_error": math.nan if error is None else error,
        "curvature/preconditioned_sharpness": math.nan if sharpness is None else sharpness,
        "curvature/num_products": measurement.num_products,
    }


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore random generators, gradients and training modes exactly at the end of the block.

    Args:
        model: model whose gradients, empty within the block, and modes are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with keeping_random_state():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
