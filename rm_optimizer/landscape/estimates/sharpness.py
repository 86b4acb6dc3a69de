"""Local geometry of the loss from a gradient and a product, without a spectrum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.operators.objective import PairObjective


@dataclass(frozen=True)
class LocalGeometry:
    """Gradient and sharpness at a point.

    Args:
        loss: the loss `L`.
        gradient_norm: `||g||`.
        sam_sharpness: `L(θ + rho g / ||g||) - L(θ)` (Foret et al., 2021, arXiv:2010.01412, Eq. 2, one ascent step).
        rho: radius of the step.
        gradient_curvature: `g^T H g / ||g||^2`, the curvature along the gradient.
        gradient_alignment: cosine of `g` and `H g`; 1 where the gradient is an eigenvector of a positive eigenvalue.
        num_pairs: pairs that the loss is averaged over.
    """

    loss: float
    gradient_norm: float
    sam_sharpness: float
    rho: float
    gradient_curvature: float
    gradient_alignment: float
    num_pairs: int


def local_geometry(objective: PairObjective, hessian: SymmetricOperator, *, rho: float = 0.05) -> LocalGeometry:
    """Loss, gradient, and sharpness along the gradient; numbers along a gradient of 0 are NaN.

    Args:
        objective: the loss.
        hessian: its Hessian.
        rho: radius of the ascent step, in the norm of all parameters.
    """
    gradient, loss = objective.gradient(), objective.value()
    norm = float(gradient.double().norm())
    if norm == 0:
        nan = float("nan")
        return LocalGeometry(loss, norm, 0.0, rho, nan, nan, objective.num_pairs)
    direction = gradient / norm
    image = hessian.apply(direction[None])[0]
    curvature = float(direction.double() @ image.double())
    length = float(image.double().norm())
    alignment = curvature / length if length else float("nan")
    sharpness = loss_at(objective, rho * direction) - loss
    return LocalGeometry(loss, norm, sharpness, rho, curvature, alignment, objective.num_pairs)


@torch.no_grad()
def loss_at(objective: PairObjective, displacement: Float[Tensor, " parameters"]) -> float:
    """Loss at the weights moved by a vector; the weights themselves are not changed."""
    weights = objective.moved(displacement)
    return objective.summed_shares(
        objective.share(objective.rewards_at(weights, batch), batch) for batch in objective.batches
    )
