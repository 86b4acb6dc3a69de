"""Approximate curvature from first derivatives, for one gradient a product or one forward pass a number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.parameters import largest_entry
from rm_optimizer.landscape.operators.vectors import inner

LARGEST_MOVE = {torch.float32: 4e-4, torch.float64: 2e-6}
"""Most that any one weight moves for a product, in root mean squares of the weights: little, so that the curvature
changes little on the way, and much beside the rounding of the gradient. On MiniLM after four steps, products are then
within 0.3 % along the top eigenvector and along random signs."""
LARGEST_MOVE_FOR_A_NUMBER = {torch.float32: 4e-3, torch.float64: 2e-5}
"""The same where only the loss is computed, whose rounding is divided by the move squared. On MiniLM `z^T H z` along
random signs is then within 1 % after twelve steps, and within 0.1 before the first, where it is 2 to 4."""


class GradientDifferences:
    """`(g(θ + s v) - g(θ)) / s`, with `s` such that no weight moves further than `LARGEST_MOVE`.

    Needs first derivatives alone, so the model keeps its own, fused, attention; the gradient at `θ` is taken once. The
    error is in proportion to `s` and a product is symmetric to that error only, which is good enough to watch a top
    eigenvalue and no basis for small ones. The weights themselves are not moved.
    """

    def __init__(self, objective: PairObjective) -> None:
        self.objective = objective
        self.num_products = 0
        self.num_numbers = 0
        self.dimension = objective.subset.num_parameters
        self.dtype = objective.dtype
        self.device = objective.device
        norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in objective.parameters]))
        self._weight_size = float(norms.norm()) / self.dimension**0.5 or 1.0
        self._loss = 0.0

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row, summed over all processes.

        Raises:
            RMOptimizerError: if a weight changed since the measurement began, or it has ended.
            TrainingDiverged: if a product is not finite.
        """
        self.objective.require_still()
        self.num_products += len(vectors)
        products = [self._product(vector) for vector in vectors.to(self.device, self.dtype)]
        return products[0][None] if len(products) == 1 else torch.stack(products)

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
        """The gradient where the weights are; leaves the loss there, too."""
        losses: list[Tensor] = []

        def gradient(batch: AnyPairBatch) -> tuple[Tensor, ...]:
            share = self._share(self.objective.parameters, batch)
            losses.append(share.detach())
            return torch.autograd.grad(share, self.objective.parameters, allow_unused=True, materialize_grads=True)

        with torch.enable_grad():
            total = self.objective.total(map(gradient, self.objective.batches))
        self._loss = self.objective.summed_shares(losses)
        return total

    def _product(self, vector: Tensor) -> Tensor:
        largest = largest_entry(vector)
        if largest == 0:
            return torch.zeros_like(vector)
        step = LARGEST_MOVE[self.dtype] * self._weight_size / largest
        here = self._gradient
        weights = [weight.requires_grad_() for weight in self.objective.moved(step * vector)]

        def gradient(batch: AnyPairBatch) -> tuple[Tensor, ...]:
            return torch.autograd.grad(self._share(weights, batch), weights, allow_unused=True, materialize_grads=True)

        return self.objective.total(map(gradient, self.objective.batches)).sub_(here).div_(step)

    def _share(self, weights: Sequence[Tensor], batch: AnyPairBatch) -> Tensor:
        """Share of a micro-batch in the loss at those weights, in float64 from the rewards on for exact differences."""
        return self.objective.share(self.objective.rewards_at(weights, batch).double(), batch)
