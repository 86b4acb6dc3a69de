"""Top eigenvalue and trace of the Hessian during training, from first derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.evaluation.draws import CurvatureMeasurement
from rm_optimizer.landscape.operators.base import LossOperator, SymmetricOperator
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import largest_entry
from rm_optimizer.landscape.operators.vectors import RandomVectors, inner, length, unit
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.schema import LossConfig

LARGEST_MOVE = {torch.float32: 4e-4, torch.float64: 2e-6}
"""Largest move of any weight in a product, in root mean squares of the weights.

It is small, so that the curvature changes little on the way, but large compared to the rounding of the gradient. On
MiniLM after four steps, products are then within 0.3 % along the top eigenvector and along random signs.
"""

LARGEST_MOVE_FOR_A_NUMBER = {torch.float32: 4e-3, torch.float64: 2e-5}
"""Largest move of any weight if only the loss is computed, whose rounding error is divided by the square of the move.

On MiniLM `z^T H z` along random signs is then within 1 % after twelve steps, and within 0.1 before the first, where it
is 2 to 4.
"""


class GradientDifferences(LossOperator):
    """`(g(θ + s v) - g(θ)) / s`, with `s` such that no weight moves further than `LARGEST_MOVE`.

    Only first derivatives are needed, so the model keeps its own fused attention. The gradient at `θ` is computed once.
    The error is proportional to `s`, and the matrix is symmetric only up to that error. This is good enough to monitor
    a top eigenvalue, but not for small ones. The weights themselves are not moved. All pairs are in this process.
    """

    def __init__(self, objective: PairObjective) -> None:
        super().__init__(objective)
        self.num_numbers = 0
        norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in objective.parameters]))
        self._weight_size = float(norms.norm()) / self.dimension**0.5 or 1.0
        self._loss = 0.0

    def _local(self, vectors: Tensor) -> Tensor:
        products = []
        for vector in vectors:
            if (largest := largest_entry(vector)) == 0:
                products.append(torch.zeros_like(vector))
                continue
            step, here = LARGEST_MOVE[self.dtype] * self._weight_size / largest, self._gradient
            weights = [weight.requires_grad_() for weight in self.objective.moved(step * vector)]
            shares = (self._share(weights, batch) for batch in self.objective.batches)
            parts = (torch.autograd.grad(share, weights, allow_unused=True, materialize_grads=True) for share in shares)
            products.append(self.objective.total(parts).sub_(here).div_(step))
        return products[0][None] if len(products) == 1 else torch.stack(products)  # a copy of one takes memory

    @torch.no_grad()
    def along(self, vector: Float[Tensor, " parameters"]) -> float:
        """`v^T H v` from the loss at one more point, `2 (L(θ + t v) - L(θ) - t g^T v) / t^2`: a third of a gradient.

        Raises:
            RMOptimizerError: if a weight changed since the measurement began, or it has ended.
        """
        self.objective.require_still()
        gradient, largest = self._gradient, largest_entry(vector)
        if largest == 0:
            return 0.0
        self.num_numbers += 1
        step = LARGEST_MOVE_FOR_A_NUMBER[self.dtype] * self._weight_size / largest
        point = self.objective.moved(step * vector)
        shares = [self._share(point, batch) for batch in self.objective.batches]
        return 2 * (self.objective.summed_shares(shares) - self._loss - step * inner(gradient, vector)) / step**2

    @cached_property
    def _gradient(self) -> Tensor:
        """The gradient at the present weights; the loss there is kept too."""
        losses: list[Tensor] = []

        def gradient(batch: AnyPairBatch) -> tuple[Tensor, ...]:
            share = self._share(self.objective.parameters, batch)
            losses.append(share.detach())
            return torch.autograd.grad(share, self.objective.parameters, allow_unused=True, materialize_grads=True)

        with torch.enable_grad():
            total = self.objective.total(map(gradient, self.objective.batches))
        self._loss = self.objective.summed_shares(losses)
        return total

    def _share(self, weights: Sequence[Tensor], batch: AnyPairBatch) -> Tensor:
        """Share of a micro-batch in the loss at these weights, computed from its rewards in float64."""
        return self.objective.share(self.objective.rewards_at(weights, batch).double(), batch)


class ScaledDifferences(SymmetricOperator):
    """`S A S` with a diagonal `S`: for an optimizer with preconditioner `P`, `S = P^{-1/2}` and `A` is the Hessian.

    Args:
        matrix: the matrix `A`.
        scale: diagonal of `S`.
    """

    def __init__(self, matrix: GradientDifferences, scale: Float[Tensor, " parameters"]) -> None:
        super().__init__(matrix.dimension, matrix.dtype, matrix.device)
        self.matrix = matrix
        self.scale = scale.to(self.device, self.dtype)

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        return self.scale * self.matrix.apply(self.scale * vectors)

    def along(self, vector: Float[Tensor, " parameters"]) -> float:
        """`v^T S A S v`."""
        return self.matrix.along(self.scale * vector)


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
) -> Callable[..., CurvatureMeasurement]:
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
    kept: dict[str, Tensor] = {}

    def top_of(name: str, matrix: Differences, num_products: int) -> _Top:
        """Top of a matrix, from the vectors of its last call."""
        if name in kept:
            found = _followed(matrix, kept[name][:num_products])
        else:
            most = min(FIRST_PRODUCTS, matrix.dimension)
            pairs = lanczos(matrix, min(2, most), tolerance=TOLERANCE, max_products=most, seed=seed)
            found = _Top(float(pairs.values[0]), pairs.vectors, float(pairs.residuals[0]))
        kept[name] = found.vectors
        return found

    def measure(scales: Mapping[str, Tensor] | None = None) -> CurvatureMeasurement:
        """Curvature at the present weights; with a scale of each parameter, the preconditioned sharpness too."""
        dtype = torch.float64 if model.reward_head.weight.dtype == torch.float64 else torch.float32
        with measuring(model, micro_batches, loss, dtype=dtype, twice=False) as objective:
            hessian, sharpness = GradientDifferences(objective), None
            top = top_of("hessian", hessian, num_products)
            if scales is not None:
                scale = objective.subset.flatten([scales[name] for name in objective.subset.names])
                sharpness = top_of("scaled", ScaledDifferences(hessian, scale), 1).value
            random = RandomVectors(hessian, seed + 1)
            return CurvatureMeasurement(
                top_eigenvalue=top.value,
                residual=top.residual,
                trace=student_mean(np.array([hessian.along(random.signs(1)[0]) for _ in range(NUM_PROBES)])),
                num_products=hessian.num_products,
                num_pairs=objective.num_pairs,
                num_tokens=sum(batch.num_padded_tokens for batch in micro_batches),
                num_gradients=num_gradients(hessian.num_products, hessian.num_numbers),
                num_gradients_next=num_gradients(num_products, 1 + NUM_PROBES)
                + (0.0 if scales is None else num_gradients(1, 1) - 1),
                preconditioned_sharpness=sharpness,
            )

    return measure


def num_gradients(num_products: int, num_numbers: int) -> float:
    """Cost of a measurement in gradients over its pairs: one at the weights, one a product, a third a number."""
    return 1 + num_products + NUMBER_GRADIENTS * num_numbers


@dataclass(frozen=True)
class _Top:
    value: float
    vectors: Float[Tensor, "vectors parameters"]
    """Vectors of the largest Ritz value and, if there is one, of the second largest."""
    residual: float


def _followed(hessian: Differences, vectors: Float[Tensor, "vectors parameters"]) -> _Top:
    """Rayleigh-Ritz over the first vector, a second direction if there is one, and residuals."""
    basis = [vectors[0]]
    images = [hessian.apply(vectors[:1])[0]]
    if len(vectors) > 1:
        # The second direction mixes the second vector and, weighted by `REST_SHARE`, the first one's residual. If the
        # first vector is an eigenvector, its residual is rounding, and a larger weight would destroy the second vector.
        rest = _rest(images[0], [*basis, *(unit(_rest(vector, basis)) for vector in vectors[1:])])
        weight = REST_SHARE / (length(images[0]) or 1.0)
        second = _rest(rest.mul_(weight) + vectors[1:].sum(dim=0), basis)
        if length(second) > _EXHAUSTED:
            basis.append(unit(second))
            images.append(hessian.apply(basis[-1][None])[0])
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
