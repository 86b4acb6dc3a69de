"""Evaluations of a run: their steps, and the best one so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.optim import OPTIMIZERS
from rm_optimizer.records.accelerator import accelerators
from rm_optimizer.records.orders import epoch_order
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.monitors import Mode, monitored_group
from rm_optimizer.training.data.in_memory import PreferenceDataModule

log = logging.getLogger("rm_optimizer")


PairMetric: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.float64]], float]
"""Number of an evaluation, by the rewards of the chosen and of the rejected responses, pair by pair."""


@dataclass
class BestSoFar:
    """The best value of the monitored metric and the evaluations since the last improvement that counts.

    A value that is not finite is never the best while there is a finite one.

    Args:
        mode: direction of improvement, smaller or larger.
        min_delta: least improvement on `reference` that counts.
        value: the best finite value; None before there is one.
        step: optimizer steps done when it was reached.
        reference: value at the last improvement that counted, which the next is measured from.
        stale: evaluations since that improvement.
    """

    mode: Mode
    min_delta: float
    value: float | None = None
    step: int = 0
    reference: float | None = None
    stale: int = 0

    def update(self, value: float, step: int) -> bool:
        """Record a new value, and return True if its weights are the best so far."""
        if not math.isfinite(value):
            self.step = step if self.value is None else self.step
            return self.value is None
        counts = self.reference is None or self._gain(value, self.reference) > self.min_delta
        self.reference, self.stale = (value, 0) if counts else (self.reference, self.stale + 1)
        if self.value is not None and self._gain(value, self.value) <= 0:
            return False
        self.value, self.step = value, step
        return True

    def _gain(self, value: float, before: float) -> float:
        return before - value if self.mode == Mode.min else value - before


def require_monitored(monitor: str, val: PreferenceDataset) -> None:
    """Refuse to monitor the accuracy of a group that validation does not have.

    Args:
        monitor: `training.monitor`.
        val: the validation pairs.

    Raises:
        ConfigError: naming the groups there are.
    """
    if (wanted := monitored_group(monitor)) is None:
        return
    column, group = wanted
    groups = {str(pair.metadata.get(column, "")) for pair in val.pairs}
    if len(groups) == 1:
        raise ConfigError(
            f"training.monitor={monitor} needs validation pairs of several values of '{column}', "
            f"got the one value '{min(groups)}'; set training.monitor=val/accuracy"
        )
    if group not in groups:
        raise ConfigError(
            did_you_mean("training.monitor", monitor, (monitor.replace(f"/{group}/", f"/{x}/") for x in groups))
        )


LARGEST_SHARE = 0.2
"""Share of the work of all steps that evaluations take unless the user sets a number."""
PER_EPOCH = 10
"""Evaluations an epoch if they cost little."""
FEWEST = 5
"""Number of evaluations below which they score a sample of the pairs during training."""
FEWEST_PAIRS = 256
"""Least number of pairs in such a sample."""
FORWARD_AND_BACKWARD, BACKWARD_OF_ADAPTER = 3.0, 2.0
"""Work of a training pass in forward passes; frozen weights need no gradient."""
FLOAT32_ON_CPU, FLOAT32_ON_GPU = 2.0, 8.0
"""Work of a float32 pass in passes under bf16 autocast."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a run, in forward passes over a token under the training's precision.

    Args:
        steps: cost of all optimizer steps.
        evaluation: cost of one evaluation of every validation pair.
        final: cost of the last evaluation, in float32.
    """

    steps: float
    evaluation: float
    final: float


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The evaluations of a run; stored in `run.json`.

    Args:
        every: optimizer steps between evaluations; one more follows the last step.
        count: evaluations during training, that before the first step included.
        pairs: validation pairs of each evaluation.
        all_pairs: validation pairs of the last evaluation, of the best weights.
        share: work of all evaluations over the work of all steps.
    """

    every: int
    count: int
    pairs: int
    all_pairs: int
    share: float

    def positions(self, seed: int) -> NDArray[np.int64] | None:
        """Tokenized validation pairs to score during training, the same each time; None is all of them."""
        if self.pairs == self.all_pairs:
            return None
        return np.sort(epoch_order(self.all_pairs, seed, 0)[: self.pairs])


def plan_of(config: TrainConfig, datamodule: PreferenceDataModule) -> EvaluationPlan:
    """The evaluations of a run, logged; they depend on its pairs and on no option that a resumed run may change."""
    training, mixed = config.training, config.hardware.precision != "32-true"
    on_gpu = bool(accelerators()) and config.hardware.accelerator != "cpu"
    evaluation = float(datamodule.val_tokens.lengths.sum())
    plan = plan_evaluations(
        Work(
            steps=work_of_steps(config, datamodule),
            evaluation=evaluation,
            final=evaluation * ((FLOAT32_ON_GPU if on_gpu else FLOAT32_ON_CPU) if mixed else 1.0),
        ),
        num_steps=datamodule.num_steps,
        steps_per_epoch=datamodule.steps_per_epoch,
        num_pairs=len(datamodule.val_tokens),
        per_epoch=training.evals_per_epoch,
        at_start=training.eval_at_start,
    )
    report(plan, training.evals_per_epoch, mixed=mixed)
    return plan


def work_of_steps(config: TrainConfig, datamodule: PreferenceDataModule) -> float:
    """Work of all optimizer steps of a run, in forward passes over a token."""
    passes = BACKWARD_OF_ADAPTER if config.adapter.kind != AdapterKind.none else FORWARD_AND_BACKWARD
    tokens_a_pair = float(datamodule.train_tokens.lengths.sum(axis=1).mean())  # of the known pairs
    tokens = tokens_a_pair * datamodule.pairs_a_step * datamodule.num_steps
    return passes * OPTIMIZERS[config.optimizer.name].passes_per_step * tokens


def plan_evaluations(
    work: Work, *, num_steps: int, steps_per_epoch: int, num_pairs: int, per_epoch: int | None, at_start: bool
) -> EvaluationPlan:
    """The user's number of evaluations, or as many as take a fifth of the work of training.

    If these are fewer than `FEWEST`, evaluations score a sample of at least `FEWEST_PAIRS` instead. The evaluations
    after the last step, of the best weights and, with `at_start`, of the untrained weights are always made.

    Args:
        work: cost of steps and evaluations.
        num_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of an epoch.
        num_pairs: validation pairs.
        per_epoch: the user's number; None lets the work decide.
        at_start: evaluate before the first step.
    """

    def planned(every: int, pairs: int) -> EvaluationPlan:
        every = min(every, num_steps)
        count = -(-num_steps // every) + at_start
        spent = count * work.evaluation * pairs / num_pairs + work.final
        return EvaluationPlan(every=every, count=count, pairs=pairs, all_pairs=num_pairs, share=spent / work.steps)

    wanted = planned(max(1, steps_per_epoch // (per_epoch or PER_EPOCH)), num_pairs)
    if per_epoch is not None or wanted.share <= LARGEST_SHARE:
        return wanted
    left = max(0.0, LARGEST_SHARE * work.steps - work.final) / work.evaluation
    pairs = num_pairs
    if left < min(FEWEST, wanted.count):
        pairs = min(num_pairs, max(FEWEST_PAIRS, int(num_pairs * left / min(FEWEST, wanted.count))))
    count = max(math.floor(left * num_pairs / pairs), 1 + at_start)
    return planned(max(wanted.every, -(-num_steps // (count - at_start))), pairs)


def report(plan: EvaluationPlan, per_epoch: int | None, *, mixed: bool) -> None:
    """Log the plan, as a warning if it takes more than a fifth of the work.

    Args:
        plan: the run's evaluations.
        per_epoch: the user's number, if any.
        mixed: evaluations during training run under bf16 autocast, as its passes do.
    """
    share = f"{plan.share:.0%} of" if plan.share < 1 else f"{plan.share:.1f} times"
    pairs = "all" if plan.pairs == plan.all_pairs else f"a fixed sample of {plan.pairs} of"
    said = (
        f"{plan.count} evaluations of {pairs} {plan.all_pairs} validation pairs{' in bf16' if mixed else ''}, every "
        f"{plan.every} steps, and a last one of all{' in float32' if mixed else ''}: about {share} the work of "
        "training"
    )
    if plan.share <= LARGEST_SHARE:
        log.info("%s", said)
    elif per_epoch is not None:
        log.warning("%s; leave out training.evals_per_epoch for at most a fifth", said)
    else:
        log.warning("%s, since validation is large relative to training; use fewer validation pairs", said)
