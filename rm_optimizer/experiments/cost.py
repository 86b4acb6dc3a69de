"""Cost of the training runs of a study, estimated from a few steps of the first run before the study starts."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl

from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training.callbacks.evaluation import evaluation_of
from rm_optimizer.training.run import run_training

MEASURED_STEPS = 3
"""Number of optimizer steps that are measured."""
EVALUATED_SHARE = 0.2
"""Cost of evaluations as a share of the cost of training, if the options do not set their number."""


class StepClock(pl.Callback):
    """Callback that measures the time of each step without evaluations.

    Attributes:
        steps: seconds of each step.
        steps_per_epoch: number of optimizer steps of an epoch; 0 before the first step.
        evaluating: seconds of all evaluations until the end of the last step.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.steps_per_epoch = 0
        self.evaluating = 0.0
        self._began = self._evaluated = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start timing the step."""
        evaluation = evaluation_of(trainer)
        self.steps_per_epoch = evaluation.datamodule.steps_per_epoch
        self._evaluated, self._began = evaluation.seconds, time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the step."""
        elapsed, self.evaluating = time.perf_counter() - self._began, evaluation_of(trainer).seconds
        self.steps.append(elapsed - (self.evaluating - self._evaluated))


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """Estimated cost of runs.

    Args:
        runs: number of runs.
        step_seconds: measured seconds of a step of the first run.
        hours: estimated hours of all runs if they run one after another.
    """

    runs: int
    step_seconds: float
    hours: float

    def __str__(self) -> str:
        step = f"{self.step_seconds:.2g} s" if self.step_seconds < 10 else f"{self.step_seconds:.0f} s"
        hours = f"{self.hours:.1f} hours" if self.hours >= 1 else f"{max(1, math.ceil(60 * self.hours))} min"
        return f"{self.runs} runs, about {hours} one after another, at {step} a step"


def study_cost(configs: Sequence[TrainConfig]) -> StudyCost:
    """Cost of training with each of these options, from a few steps with the first.

    The cost of a step is assumed to be proportional to its pairs and to the passes of the optimizer. Runs of other
    models are assumed to cost as much as runs of the first model.

    Args:
        configs: options of the runs.

    Raises:
        ConfigError: if the first run cannot start here.
    """
    clock = StepClock()
    first = configs[0]
    training = replace(
        first.training, max_steps=MEASURED_STEPS, checkpoint_every=MEASURED_STEPS, evals_per_epoch=1, progress=False
    )
    logger = replace(first.logger, tensorboard=False, wandb=False)
    with tempfile.TemporaryDirectory() as scratch:
        before = time.monotonic()
        short = replace(first, training=training, output_dir=scratch, logger=logger)
        run_training(short, callbacks=[clock])
        whole = time.monotonic() - before
    step, pairs = min(clock.steps), clock.steps_per_epoch * first.batching.batch_size
    evaluation = clock.evaluating / (1 + first.training.eval_at_start)  # the last one, and perhaps the first
    pass_seconds = step / (first.batching.batch_size * OPTIMIZERS[first.optimizer.name].passes_per_step)
    start, seconds = max(0.0, whole - sum(clock.steps) - clock.evaluating), 0.0
    for config in configs:
        passes, per_epoch = OPTIMIZERS[config.optimizer.name].passes_per_step, config.training.evals_per_epoch
        run = steps_of(config, pairs) * config.batching.batch_size * passes * pass_seconds
        if per_epoch is None:
            run = run * (1 + EVALUATED_SHARE) + evaluation
        else:
            run += (math.ceil(per_epoch * config.training.epochs) + 1) * evaluation
        seconds += start + run
    return StudyCost(runs=len(configs), step_seconds=step, hours=seconds / 3600)


def steps_of(config: TrainConfig, num_pairs: int) -> int:
    """Number of optimizer steps of a run with `num_pairs` training pairs."""
    training, steps = config.training, math.ceil(num_pairs / config.batching.batch_size)
    # As `PreferenceDataModule` computes it: 1.1 epochs of 10 steps are 11.000000000000002.
    return training.max_steps or max(1, math.ceil(training.epochs * steps - 1e-9))
