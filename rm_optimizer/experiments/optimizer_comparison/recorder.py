"""Record of a run of a comparison: order of the pairs, learning curve, time, memory and passes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.experiments.cost import StepClock
from rm_optimizer.optim.mechanism import StartingPoint, check_mechanism, mechanism_state
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.training.callbacks.loop import evaluation_of
from rm_optimizer.training.callbacks.rss import rss_bytes
from rm_optimizer.training.lightning_module import RewardModelLightning

WARM_UP = 2
"""Number of first steps that are not timed."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint(JsonRecord):
    """An evaluation during training.

    Args:
        step: optimizer steps done.
        tokens: training tokens until then, without padding.
        seconds: seconds of the steps until then.
        nll: validation NLL.
        accuracy: validation accuracy.
    """

    step: int
    tokens: int
    seconds: float
    nll: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class LearningCurve(JsonRecord):
    """Evaluations of a run, `curve.json` in a trial's work folder.

    Args:
        points: evaluations in order.
    """

    points: tuple[CurvePoint, ...]


class ArmRecorder(StepClock):
    """Callback that records a run without changing it, and refuses an optimizer whose first step breaks its rule.

    Args:
        optimizer: name of the optimizer in the registry.

    Attributes:
        initial: digest of the weights before the first step.
        points: evaluations in order.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self._optimizer, self.initial = optimizer, ""
        self._before: StartingPoint | None = None
        self.points: list[CurvePoint] = []
        self._order = hashlib.sha256()
        self._tokens = self._peak = self._clipped = self._state_bytes = self._passes = 0

    @property
    def values(self) -> dict[str, float | int | str | None]:
        """Recorded numbers of the run."""
        timed = self.steps[WARM_UP:] or self.steps
        return {
            "initial": self.initial,
            "order": self._order.hexdigest()[:16],
            "tokens": self._tokens,
            "step_seconds": median(timed),
            "train_seconds": sum(self.steps),
            "passes_per_step": self._passes / len(self.steps),
            "clipped_share": self._clipped / len(self.steps),
            "state_bytes": self._state_bytes,
            "peak_memory_bytes": self._peak,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute the digest of the weights before training."""
        assert isinstance(pl_module, RewardModelLightning)
        self.initial = weights_digest(pl_module.model)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Copy the weights before the first step, and start timing the step."""
        if not self.steps:
            self._before = mechanism_state(trainer.optimizers[0])
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, and the evaluation if there was one."""
        assert isinstance(pl_module, RewardModelLightning)
        assert isinstance(batch, MacroBatch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._order.update(np.ascontiguousarray(batch.pair_index, dtype="<i8").tobytes())
        self._tokens += sum(micro.num_tokens for micro in batch.micro)
        limit = pl_module.gradient_clip_norm or float("inf")
        self._clipped += pl_module.step_metrics["train/grad_norm"] > limit
        self._passes = pl_module.passes_made
        self._peak = max(self._peak, _memory_bytes())
        if self._before is not None:
            check_mechanism(trainer.optimizers[0], self._optimizer, self._before, passes=self._passes)
            self._before = None
            self._state_bytes = _state_bytes(trainer.optimizers[0])
        latest = evaluation_of(trainer).latest
        if latest is not None and latest.step == trainer.global_step:
            scores = {"nll": latest.metrics.nll.value, "accuracy": latest.metrics.accuracy.value}
            point = CurvePoint(step=latest.step, tokens=self._tokens, seconds=sum(self.steps), **scores)
            self.points.append(point)


def _memory_bytes() -> int:
    """Peak memory of the GPU since the start of training, or the present resident memory without a GPU."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else rss_bytes()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
