"""Top eigenvalue and trace of the Hessian during training, for little time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.batching import AnyPairBatch
from rm_optimizer.core.curvature import CurvatureReading
from rm_optimizer.core.estimate import Estimate
from rm_optimizer.core.reward_model import BradleyTerryRM
from rm_optimizer.landscape.differences import GradientDifferences
from rm_optimizer.landscape.lanczos import lanczos
from rm_optimizer.landscape.objective import measuring
from rm_optimizer.landscape.random_vectors import RandomVectors
from rm_optimizer.landscape.vectors import inner, length, unit
from rm_optimizer.schema import LossConfig

FIRST_PRODUCTS = 10
"""Products of the first reading's top eigenvalue, at most; it has nothing to start from."""
TOLERANCE = 0.02
"""Relative error of the top eigenvalue that ends the first reading's search for it."""
REMEMBERED = 8
"""Readings whose probes give the trace's standard error."""
_EXHAUSTED = 1e-6
"""Rest of a product, relative to it, below which its vector is an eigenvector."""


def measure_curvature(
    model: BradleyTerryRM, micro_batches: Sequence[AnyPairBatch], loss: LossConfig, *, seed: int = 0
) -> Callable[[], CurvatureReading]:
    """Makes a measurement that is called again and again while the model trains.

    The first call finds the top eigenvector by Lanczos. Each later one takes two Lanczos steps from the last call's
    vector, of which the second needs no product but one number, `q^T H q`; and each ends with one probe of the trace
    with that vector taken out (Hutchinson, 1990), one more number. So a later call costs two gradients, one of them a
    product by differences, and two forward passes: 2.7 gradients of the pairs. Weights, gradients, modes and
    random generators are left as they were. Every process that calls it measures by itself.

    Args:
        model: the model in training.
        micro_batches: the pairs, the same for every call.
        loss: what is minimised.
        seed: of the first vector and of the probes, which are drawn anew in each call.
    """
    start: Tensor | None = None
    probes: list[float] = []

    def measure() -> CurvatureReading:
        nonlocal start
        dtype = torch.float64 if model.reward_head.weight.dtype == torch.float64 else torch.float32
        with measuring(model, micro_batches, loss, dtype=dtype, twice=False) as objective:
            hessian = GradientDifferences(objective)
            top = _found(hessian, seed) if start is None else _two_steps(hessian, start)
            start = top.vector
            probe = RandomVectors(hessian, seed + len(probes) + 1).signs(1)[0]
            probes.append(hessian.along(probe.sub_(start, alpha=inner(start, probe))))
            return CurvatureReading(
                top_eigenvalue=top.value,
                residual=top.residual,
                trace=Estimate(top.value + probes[-1], _standard_error(probes[-REMEMBERED:]), 1),
                num_products=hessian.num_products,
                num_pairs=objective.num_pairs,
            )

    return measure


@dataclass(frozen=True)
class _Top:
    value: float
    vector: Float[Tensor, " parameters"]
    residual: float


def _found(hessian: GradientDifferences, seed: int) -> _Top:
    most = min(FIRST_PRODUCTS, hessian.dimension)
    pairs = lanczos(hessian, 1, tolerance=TOLERANCE, max_products=most, seed=seed)
    return _Top(float(pairs.values[0]), pairs.vectors[0], float(pairs.residuals[0]))


def _two_steps(hessian: GradientDifferences, start: Float[Tensor, " parameters"]) -> _Top:
    """The larger Ritz value of the plane of a vector and its product; the residual is that of the vector."""
    rest = hessian.apply(start[None])[0]
    size, along = length(rest), inner(start, rest)
    residual = length(rest.sub_(start, alpha=along))
    if residual <= _EXHAUSTED * size or hessian.dimension == 1:
        return _Top(along, start, residual)
    direction = rest.div_(residual)
    values, vectors = np.linalg.eigh([[along, residual], [residual, hessian.along(direction)]])
    first, second = vectors[:, -1].tolist()
    return _Top(float(values[-1]), unit(first * start + second * direction), residual)


def _standard_error(probes: Sequence[float]) -> float | None:
    """From differences of successive readings, `mean d^2 / 2` (von Neumann, 1941); drift between them adds to it."""
    if len(probes) < 2:
        return None
    return math.sqrt(float(np.mean(np.diff(probes) ** 2)) / 2)
