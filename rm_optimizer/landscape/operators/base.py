"""Symmetric matrices defined by products with vectors: Hessian, Gauss-Newton and empirical Fisher of a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.products import choose_product

VECTORS_AT_ONCE = 4
"""Rows that are multiplied together; they share computation, and memory grows with their number."""

OutputCurvature = Literal["gauss_newton", "fisher"]


class SymmetricOperator(ABC):
    """A symmetric matrix that multiplies vectors.

    Args:
        dimension: rows of the matrix.
        dtype: type of the vectors.
        device: device of the vectors.

    Attributes:
        is_semidefinite: True if no eigenvalue is negative.
    """

    is_semidefinite = False

    def __init__(self, dimension: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dimension = dimension
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""


class MatrixOperator(SymmetricOperator):
    """Symmetric matrix that is stored as such.

    Example:
        >>> MatrixOperator(torch.diag(torch.tensor([1.0, 2.0]))).apply(torch.ones(1, 2))
        tensor([[1., 2.]])
    """

    def __init__(self, matrix: Float[Tensor, "parameters parameters"]) -> None:
        super().__init__(len(matrix), matrix.dtype, matrix.device)
        self.matrix = matrix

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        return vectors @ self.matrix


class DeflatedOperator(SymmetricOperator):
    """`P A P` with `P` the projection that removes orthonormal vectors.

    Args:
        operator: the matrix `A`.
        vectors: orthonormal vectors to remove, one a row.
        value: eigenvalue that they get instead.
    """

    def __init__(
        self, operator: SymmetricOperator, vectors: Float[Tensor, "removed parameters"], *, value: float = 0.0
    ) -> None:
        super().__init__(operator.dimension, operator.dtype, operator.device)
        self.operator = operator
        self.is_semidefinite = operator.is_semidefinite and value >= 0
        self.value = value
        self.vectors = vectors.to(operator.device, operator.dtype)

    def project(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The vectors without their components along the removed ones."""
        for _ in range(2):
            vectors = vectors - (vectors @ self.vectors.T) @ self.vectors
        return vectors

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row."""
        left = self.project(vectors)
        return self.project(self.operator.apply(left)).add_(vectors - left, alpha=self.value)


class LossOperator(SymmetricOperator):
    """Common part of the operators of a loss; `on_product` receives the number of products so far."""

    def __init__(self, objective: PairObjective) -> None:
        super().__init__(objective.subset.num_parameters, objective.dtype, objective.device)
        self.objective = objective
        self.num_products = 0
        self.on_product: Callable[[int], None] = lambda num_products: None

    @abstractmethod
    def _local(self, vectors: Tensor) -> Tensor:
        """Products with this process's part of the matrix, from its pairs."""

    def release(self) -> None:
        """Free memory; the next product builds its contents again."""

    def apply(self, vectors: Float[Tensor, "vectors parameters"]) -> Float[Tensor, "vectors parameters"]:
        """The matrix times each row, summed over all processes.

        Raises:
            RMOptimizerError: if a weight changed since the measurement began, or it has ended.
            TrainingDiverged: if a product is not finite.
        """
        self.objective.require_still()
        products = []
        for part in torch.split(vectors.to(self.device, self.dtype), VECTORS_AT_ONCE):
            products.append(self.objective.summed(self._local(part)))
            self.num_products += len(part)
            self.on_product(self.num_products)
        return self.objective.checked(torch.cat(products) if len(products) > 1 else products[0])


class HessianOperator(LossOperator):
    """The Hessian of the loss over a subset of parameters.

    Args:
        objective: the loss.
        product: product method, or `auto`; see `choose_product`. `choice` holds the method and its cost.
        graph_memory_bytes: most memory for kept graphs; None takes half of what is free.
    """

    def __init__(
        self, objective: PairObjective, *, product: str = "auto", graph_memory_bytes: int | None = None
    ) -> None:
        super().__init__(objective)
        self.choice = choose_product(objective, product, graph_memory_bytes=graph_memory_bytes)

    @property
    def product(self) -> str:
        """Name of the product method."""
        return self.choice.product.name

    def release(self) -> None:
        """Free the memory of kept graphs; the next product builds them again."""
        self.choice.product.release()

    def _local(self, vectors: Tensor) -> Tensor:
        return self.choice.product(vectors)


class OutputOperator(LossOperator):
    """`J^T C J` with `J` the derivative of all rewards and `C` a small matrix for the two rewards of each pair.

    Gauss-Newton has `C_i = w_i / W  d^2 l_i / d(c, r)^2`, exact for the whole loss as a function
    of rewards: smoothing, soft labels, margins and both regularizers (Schraudolph, 2002). The empirical Fisher has
    `C_i = w_i / W (d l_i / d(c, r)) (d l_i / d(c, r))^T`: it is `sum_i w_i g_i g_i^T / W` with a pair's gradient `g_i`.

    Args:
        objective: the loss.
        curvature: `gauss_newton` or `fisher`.
    """

    is_semidefinite = True

    def __init__(self, objective: PairObjective, curvature: OutputCurvature) -> None:
        super().__init__(objective)
        self.curvature = curvature

    def _local(self, vectors: Tensor) -> Tensor:
        # The directional derivative `J v` is the derivative of `(J^T u)^T v` by `u`, at any `u` (the double-backward
        # trick of Townsend, 2017, https://j-towns.github.io/2017/06/12/A-new-trick.html).
        objective, total = self.objective, torch.zeros_like(vectors)
        kept: dict[str, bool] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        for batch in objective.batches:
            rewards = objective.model.rewards_of(batch)
            blocks = output_blocks(objective, batch, rewards.detach(), self.curvature)
            dummy = torch.zeros_like(rewards, requires_grad=True)
            linear = torch.autograd.grad(rewards, objective.parameters, dummy, create_graph=True, **kept)
            for row, vector in enumerate(vectors):
                parts = zip(linear, objective.subset.unflatten(vector), strict=True)
                outputs, seeds = zip(*((out, part) for out, part in parts if out.requires_grad), strict=True)
                tangent = torch.autograd.grad(outputs, dummy, seeds, retain_graph=True)[0]  # `J v`
                curved = torch.einsum("pij,pj->pi", blocks, tangent.view(-1, 2)).reshape(-1)  # `C J v`
                gradient = torch.autograd.grad(rewards, objective.parameters, curved, **kept)
                total[row] += objective.subset.flatten(gradient)
        return total


def output_blocks(
    objective: PairObjective, batch: AnyPairBatch, rewards: Float[Tensor, " sequences"], curvature: OutputCurvature
) -> Float[Tensor, "pairs 2 2"]:
    """The matrix `C_i` of each pair, its weight included: rows and columns are the chosen and the rejected reward."""
    if curvature == "fisher":
        factors = fisher_factors(objective, batch, rewards)
        return factors[:, :, None] * factors[:, None, :]
    rewards = rewards.clone().requires_grad_()
    losses = objective.pair_losses(rewards, batch)
    (slope,) = torch.autograd.grad(losses.sum(), rewards, create_graph=True)
    rows = [torch.autograd.grad(side.sum(), rewards, retain_graph=True)[0] for side in slope.view(-1, 2).unbind(dim=1)]
    blocks = torch.stack([row.view(-1, 2) for row in rows], dim=1)
    share = batch.weight.to(blocks.dtype) / objective.total_weight
    return torch.einsum("p,pij->pij", share, blocks)


def fisher_factors(
    objective: PairObjective, batch: AnyPairBatch, rewards: Float[Tensor, " sequences"]
) -> Float[Tensor, "pairs 2"]:
    """`sqrt(w_i / W) d l_i / d(c, r)`, whose outer products are the empirical Fisher's `C_i`."""
    rewards = rewards.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.pair_losses(rewards, batch).sum(), rewards)
    share = batch.weight.to(slope.dtype) / objective.total_weight
    return share.sqrt()[:, None] * slope.view(-1, 2)
