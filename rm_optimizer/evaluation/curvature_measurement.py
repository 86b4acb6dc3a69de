"""Result of one curvature measurement during training, computed by the landscape and logged by training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.schema import LossConfig


@dataclass(frozen=True)
class CurvatureMeasurement:
    """Top eigenvalue and trace of the Hessian of the loss on a fixed set of pairs.

    Args:
        top_eigenvalue: a Rayleigh quotient, so the largest algebraic eigenvalue is at least that, but for the error of
            the products; how far above it lies is not known.
        residual: ``||H v - (v^T H v) v||`` of a unit vector with ``v^T H v <= top_eigenvalue``: some eigenvalue lies
            within it of ``v^T H v``, which need not be the largest, so it is no error of the top eigenvalue.
        trace: Hutchinson's estimate from random probes.
        num_products: Hessian-vector products spent; numbers ``v^T H v`` from the loss alone are not counted.
        num_pairs: pairs that the loss is averaged over.
        num_tokens: tokens of their micro-batches, with padding.
        num_gradients: cost in gradients over these pairs; a number `v^T H v` is a third of one.
        num_gradients_next: cost of the next measurement, if the eigenvectors turn little until then.
        preconditioned_sharpness: largest eigenvalue of `S H S`, as `top_eigenvalue` a Rayleigh quotient; None where no
            scale `S` was given.
    """

    top_eigenvalue: float
    residual: float
    trace: Estimate
    num_products: int
    num_pairs: int
    num_tokens: int
    num_gradients: float
    num_gradients_next: float
    preconditioned_sharpness: float | None = None


class MeasureCurvature(Protocol):
    """Measurement of the weights as they are at the call."""

    def __call__(self, scales: Mapping[str, Tensor] | None = None) -> CurvatureMeasurement:
        """Measure the Hessian, and the same in a scale of the parameters by their names if one is given."""


MeasurementFactory = Callable[[BradleyTerryRM, Sequence[AnyPairBatch], LossConfig], MeasureCurvature]
"""Makes a measurement of a model's curvature on fixed micro-batches; each call measures the weights as they are then,
and leaves weights, gradients, modes and random generators as they were."""
