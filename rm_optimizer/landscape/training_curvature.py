"""Top eigenvalue and trace of the Hessian during training, at low cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.evaluation.draws import CurvatureMeasurement
from rm_optimizer.landscape.operators.differences import GradientDifferences, ScaledDifferences
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.vectors import RandomVectors, inner, length, unit
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.schema import LossConfig

Differences = GradientDifferences | ScaledDifferences
FIRST_PRODUCTS = 10
"""Most products for a measurement's top eigenvalue. The first measurement has no vectors to start from."""
SETTLED = 0.25
"""Residual, relative to the value, above which a later measurement takes further products.

If the top vector changed by half between two measurements, values are then within 3 % and not 28 % off.
"""
TOLERANCE = 0.02
"""Relative error of the top eigenvalue that ends the first measurement's search for it."""
NUM_PROBES = 4
"""Random vectors of the trace, one forward pass each."""
REST_SHARE = 3.0
"""Weight of the first vector's residual, relative to its image, in the direction that it shares with the second vector.

Both have equal weight if the residual is a third of the eigenvalue. The second vector has all of it if the first one is
an eigenvector."""
NUMBER_GRADIENTS = 1 / 3
"""Cost of a number `v^T H v`, one forward pass, in gradients."""
_EXHAUSTED = 1e-6
"""Length of a residual, relative to the product, below which the vector counts as an eigenvector."""


def measure_curvature(
    model: BradleyTerryRM,
    micro_batches: Sequence[AnyPairBatch],
    loss: LossConfig,
    *,
    num_products: int = 2,
    seed: int = 0,
) -> _Measurement:
    """Create a measurement that is called repeatedly while the model trains.

    The first call finds the top two eigenvectors by Lanczos. Each later call starts from the last call's two Ritz
    vectors. At the present weights it takes a product with the first vector. With `num_products` of 2 it takes another
    one with a mixture of the second vector and the first one's residual, which reveals an eigenvalue that overtakes the
    first. Products with residuals follow as long as the residual is more than `SETTLED` of the value, up to
    `FIRST_PRODUCTS`. For the last residual `q` only the number `q^T H q` is computed. Rayleigh-Ritz over all these
    vectors gives the value and the next two vectors. No product is kept for the next call, since the matrix changes.

    Each call ends with a number along each of `NUM_PROBES` random vectors for the trace (Hutchinson, 1990). The vectors
    are the same in every call. Their error is then common to all calls and does not hide a change of the matrix. A
    later call therefore costs a gradient, one more for each product and a third of one for each number: 3.7 gradients
    of the pairs with one product, 4.7 with two. With a scale `S` a call also follows the largest eigenvalue of `S H S`
    in the same way with one product, for 1.3 gradients more. Weights, gradients, modes and random generators are
    restored. Every process that calls it measures on its own.

    Args:
        model: the model in training.
        micro_batches: the pairs, the same for every call.
        loss: training loss.
        num_products: usual number of products of each call after the first, 1 or 2.
        seed: seed of the first vector and of the probes.
    """
    return _Measurement(model, micro_batches, loss, num_products, seed)


@dataclass
class _Measurement:
    """Measurement that is called repeatedly, with the vectors of the last call."""

    model: BradleyTerryRM
    micro_batches: Sequence[AnyPairBatch]
    loss: LossConfig
    num_products: int
    seed: int
    vectors: Tensor | None = None
    scaled_vectors: Tensor | None = None

    def __call__(self, scales: Mapping[str, Tensor] | None = None) -> CurvatureMeasurement:
        """Curvature at the present weights; with a scale of each parameter, the preconditioned sharpness too."""
        dtype = torch.float64 if self.model.reward_head.weight.dtype == torch.float64 else torch.float32
        with measuring(self.model, self.micro_batches, self.loss, dtype=dtype, twice=False) as objective:
            hessian = GradientDifferences(objective)
            top = self._top(hessian, self.vectors, self.num_products)
            self.vectors = top.vectors
            random, sharpness = RandomVectors(hessian, self.seed + 1), None
            if scales is not None:
                scale = objective.subset.flatten([scales[name] for name in objective.subset.names])
                scaled = self._top(ScaledDifferences(hessian, scale), self.scaled_vectors, 1)
                self.scaled_vectors, sharpness = scaled.vectors, scaled.value
            return CurvatureMeasurement(
                top_eigenvalue=top.value,
                residual=top.residual,
                trace=student_mean(np.array([hessian.along(random.signs(1)[0]) for _ in range(NUM_PROBES)])),
                num_products=hessian.num_products,
                num_pairs=objective.num_pairs,
                num_tokens=sum(batch.num_padded_tokens for batch in self.micro_batches),
                num_gradients=num_gradients(hessian.num_products, hessian.num_numbers),
                num_gradients_next=num_gradients(self.num_products, 1 + NUM_PROBES)
                + (0.0 if scales is None else num_gradients(1, 1) - 1),
                preconditioned_sharpness=sharpness,
            )

    def _top(self, matrix: Differences, vectors: Tensor | None, num_products: int) -> _Top:
        if vectors is not None:
            return _followed(matrix, vectors[:num_products])
        most = min(FIRST_PRODUCTS, matrix.dimension)
        pairs = lanczos(matrix, min(2, most), tolerance=TOLERANCE, max_products=most, seed=self.seed)
        return _Top(float(pairs.values[0]), pairs.vectors, float(pairs.residuals[0]))


def num_gradients(num_products: int, num_numbers: int) -> float:
    """Cost of a measurement in gradients over its pairs: one at the weights, one a product, a third a number."""
    return 1 + num_products + NUMBER_GRADIENTS * num_numbers


@dataclass(frozen=True)
class _Top:
    value: float
    vectors: Float[Tensor, "vectors parameters"]
    """Vector of the largest Ritz value, and that of the second largest if there is one."""
    residual: float


def _followed(hessian: Differences, vectors: Float[Tensor, "vectors parameters"]) -> _Top:
    """Rayleigh-Ritz over the first vector, a second direction if there is one, and residuals."""
    basis = [vectors[0]]
    images = [hessian.apply(vectors[:1])[0]]
    beside = _beside(basis[0], images[0], vectors[1:]) if len(vectors) > 1 else None
    if beside is not None:
        basis.append(beside)
        images.append(hessian.apply(beside[None])[0])
    while True:
        matrix = np.array([[inner(vector, image) for image in images] for vector in basis])
        matrix = (matrix + matrix.T) / 2
        values, weights = np.linalg.eigh(matrix)
        rest = _rest(_combined(weights[:, -1], images), basis)
        residual = length(rest)
        if residual <= _EXHAUSTED * length(images[0]):
            break
        basis.append(rest.div_(residual))
        if residual <= SETTLED * abs(values[-1]) or len(images) >= min(FIRST_PRODUCTS, hessian.dimension - 1):
            coupling = np.array([[inner(basis[-1], image)] for image in images])
            values, weights = np.linalg.eigh(np.block([[matrix, coupling], [coupling.T, hessian.along(basis[-1])]]))
            break
        images.append(hessian.apply(basis[-1][None])[0])
    ritz = [unit(_combined(column, basis)) for column in weights.T[::-1][:2]]
    return _Top(float(values[-1]), torch.stack(ritz), residual)


def _beside(first: Tensor, image: Tensor, second: Tensor) -> Tensor | None:
    """Mixture of the second vector and, weighted by `REST_SHARE`, the first one's residual; None if there is neither.

    If the first vector is an eigenvector, its residual is rounding, and a larger weight would destroy the second
    vector.
    """
    size = length(image) or 1.0
    rest = _rest(image, [first, *(unit(_rest(vector, [first])) for vector in second)])
    direction = _rest(rest.mul_(REST_SHARE / size) + second.sum(dim=0), [first])
    return unit(direction) if length(direction) > _EXHAUSTED else None


def _rest(vector: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """Part of a vector outside an orthonormal basis."""
    rest = vector.clone()
    for direction in (*basis, *basis):  # twice, since rounding leaves a part after the first time
        rest.sub_(direction, alpha=inner(direction, rest))
    return rest


def _combined(weights: np.ndarray, vectors: Sequence[Tensor]) -> Tensor:
    total = float(weights[0]) * vectors[0]
    for weight, vector in zip(weights[1:].tolist(), vectors[1:], strict=True):
        total.add_(vector, alpha=weight)
    return total
