"""Result of one curvature measurement during training, computed by the landscape and logged by training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.schema import LossConfig


@dataclass(frozen=True)
class CurvatureMeasurement:
    """Top eigenvalue and trace of the Hessian of the loss on a fixed set of pairs.

    Args:
        top_eigenvalue: Rayleigh quotient. Up to the error of the products, the largest algebraic eigenvalue is at least
            this large. It is unknown how much larger it is.
        residual: ``||H v - (v^T H v) v||`` of a unit vector with ``v^T H v <= top_eigenvalue``. Some eigenvalue is
            within this distance of ``v^T H v``. It need not be the largest, so this is no error of the top eigenvalue.
        trace: Hutchinson's estimate from random probes.
        num_products: number of Hessian-vector products, without the values ``v^T H v`` computed from the loss alone.
        num_pairs: number of pairs in the mean loss.
        num_tokens: tokens of their micro-batches, with padding.
        num_gradients: cost in gradients over these pairs; a value `v^T H v` costs a third of a gradient.
        num_gradients_next: cost of the next measurement, if the eigenvectors change little until then.
        preconditioned_sharpness: largest eigenvalue of `S H S`, a Rayleigh quotient like `top_eigenvalue`; None if no
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


MeasureCurvature = Callable[[Mapping[str, Tensor] | None], CurvatureMeasurement]
"""Measurement of the Hessian at the present weights; with scales of the parameters by name, of the scaled one too."""
MeasurementFactory = Callable[[BradleyTerryRM, Sequence[AnyPairBatch], LossConfig], MeasureCurvature]
"""Function that returns a measurement of a model's curvature on fixed micro-batches. Each call of the measurement uses
the weights of that time, and does not change weights, gradients, modes and random generators."""
