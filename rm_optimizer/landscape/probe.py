"""Top eigenvalue and trace of the Hessian during training, for little time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rm_optimizer.core.batching import AnyPairBatch
from rm_optimizer.core.curvature import CurvatureReading
from rm_optimizer.core.reward_model import BradleyTerryRM
from rm_optimizer.landscape.differences import GradientDifferences
from rm_optimizer.landscape.lanczos import lanczos
from rm_optimizer.landscape.objective import measuring
from rm_optimizer.landscape.trace import deflated_trace
from rm_optimizer.schema import LossConfig

FIRST_PRODUCTS = 10
"""Products of the first reading's top eigenvalue, at most; it has nothing to start from."""
TOLERANCE = 0.02
"""Relative error of the top eigenvalue that ends the search for it."""


def measure_curvature(
    model: BradleyTerryRM,
    micro_batches: Sequence[AnyPairBatch],
    loss: LossConfig,
    *,
    max_products: int = 2,
    num_probes: int = 1,
    seed: int = 0,
) -> Callable[[], CurvatureReading]:
    """Makes a measurement that is called again and again while the model trains.

    Each call finds the top eigenvector by Lanczos from the last call's, then estimates the trace by Hutchinson's probes
    with that eigenvector taken out. Products are differences of gradients, so a call costs `1 + max_products +
    num_probes` gradients of the pairs, the first one more. Weights, gradients, modes and random generators are left as
    they were. Every process that calls it measures by itself.

    Args:
        model: the model in training.
        micro_batches: the pairs, the same for every call.
        loss: what is minimised.
        max_products: products of a call's top eigenvalue after the first call.
        num_probes: probes of the trace, one product each.
        seed: of the first vector and of the probes, which are drawn anew in each call.
    """
    start: Tensor | None = None
    calls = 0

    def measure() -> CurvatureReading:
        nonlocal start, calls
        calls += 1
        dtype = torch.float64 if model.reward_head.weight.dtype == torch.float64 else torch.float32
        with measuring(model, micro_batches, loss, dtype=dtype, twice=False) as objective:
            hessian = GradientDifferences(objective)
            most = min(FIRST_PRODUCTS if start is None else max_products, hessian.dimension)
            top = lanczos(hessian, 1, tolerance=TOLERANCE, max_products=most, seed=seed, start=start)
            start = top.vectors
            return CurvatureReading(
                top_eigenvalue=float(top.values[0]),
                residual=float(top.residuals[0]),
                trace=deflated_trace(hessian, top, num_probes, seed=seed + calls),
                num_products=hessian.num_products,
                num_pairs=objective.num_pairs,
            )

    return measure
