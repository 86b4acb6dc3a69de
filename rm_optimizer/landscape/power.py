"""Eigenpairs by power iteration with deflation: simple, slow, kept to teach and to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.combined import DeflatedOperator
from rm_optimizer.landscape.lanczos import Eigenpairs
from rm_optimizer.landscape.operators import SymmetricOperator
from rm_optimizer.landscape.random_vectors import RandomVectors
from rm_optimizer.landscape.vectors import orthogonality_loss, unit


def power_iteration(
    operator: SymmetricOperator, top_k: int, *, tolerance: float = 1e-3, max_products: int = 2000, seed: int = 0
) -> Eigenpairs:
    """The eigenpairs of largest magnitude, one after the other: `v <- A v / ||A v||`, those found taken out.

    Stops at a value when `||A v - lambda v|| <= tolerance |lambda|`, a sure bound on its error, and never because it
    changed little: near two values of like magnitude and opposite sign it changes little long before it is right.

    Args:
        operator: the matrix.
        top_k: how many.
        tolerance: relative residual that ends each.
        max_products: products in all, divided evenly over the values.
        seed: of the starting vectors.

    Raises:
        ConfigError: if more values are wanted than the matrix has.
    """
    if not 1 <= top_k <= operator.dimension:
        raise ConfigError(f"top_k must lie in [1, {operator.dimension}], got {top_k}")
    random = RandomVectors(operator, seed)
    vectors = torch.empty(0, operator.dimension, dtype=operator.dtype, device=operator.device)
    found: list[tuple[float, float]] = []
    spent = 0
    for _ in range(top_k):
        rest = DeflatedOperator(operator, vectors)
        vector, value, residual, products = _dominant(rest, random.normals(1), tolerance, max_products // top_k)
        spent += products
        vectors = torch.cat([vectors, vector])
        found.append((value, residual))
    order = sorted(range(top_k), key=lambda index: -found[index][0])
    values, residuals = (torch.tensor([found[i][side] for i in order], dtype=torch.float64) for side in (0, 1))
    converged = tuple((residuals <= tolerance * values.abs()).tolist())
    loss = orthogonality_loss([vectors])
    return Eigenpairs(values, vectors[order], residuals, residuals, converged, spent, loss)


def _dominant(
    operator: DeflatedOperator, start: Tensor, tolerance: float, max_products: int
) -> tuple[Tensor, float, float, int]:
    """Unit vector, its Rayleigh quotient and residual, and the products spent."""
    vector = unit(operator.project(start)[0])[None]
    products = 0
    while True:
        image = operator.apply(vector)
        products += 1
        value = float((vector.double() * image.double()).sum())
        residual = float((image.double() - value * vector.double()).norm())
        if residual <= tolerance * abs(value) or products >= max_products or not image.any():
            return vector, value, residual, products
        vector = unit(operator.project(image)[0])[None]
