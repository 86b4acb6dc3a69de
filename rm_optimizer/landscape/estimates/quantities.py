"""Numbers of the loss at a point: derived quantities, effective rank, and local geometry along the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.landscape.operators.base import SymmetricOperator
from rm_optimizer.landscape.operators.gauss_newton import CurvatureRows, GramSpectrum
from rm_optimizer.landscape.operators.objective import PairObjective


@dataclass(frozen=True)
class Quantity:
    """Derived number, or the reason why it is missing.

    Args:
        estimate: the number. From a trace or density that was estimated it has a standard error. From eigenvalues alone
            it has none, and an interval as wide as their error bounds allow; its `num_samples` is then 0.
        reason: reason why the number is missing.
        note: exact definition, where that depends on the spectrum.
    """

    estimate: Estimate | None
    reason: str | None = None
    note: str | None = None

    @property
    def value(self) -> float | None:
        """The number alone."""
        return None if self.estimate is None else self.estimate.value

    @property
    def number(self) -> float:
        """The number alone; NaN if it is missing."""
        return math.nan if self.estimate is None else self.estimate.value

    @property
    def text(self) -> str:
        """The number with its error, or without it if it is below the digits shown, or the reason for its absence."""
        estimate = self.estimate
        if estimate is None:
            return f"n/a: {self.reason}"
        note = f" ({self.note})" if self.note else ""
        if estimate.low is not None and estimate.high is None:
            return f"> {estimate.low:.4g}{note}"
        ends = {f"{end:.4g}" for end in (estimate.low, estimate.high) if end is not None}
        is_known = estimate.standard_error == 0 or ends == {f"{estimate.value:.4g}"}
        return (f"{estimate.value:.4g}" if is_known else f"{estimate:.4g}") + note


def within(value: float, bound: float) -> Estimate:
    """Number without a sampling error, known within a bound."""
    return _between(value, value - bound, value + bound)


def _between(value: float, low: float, high: float) -> Estimate:
    """Number without a sampling error, known to lie between two others."""
    kind = IntervalKind.exact if low == high else IntervalKind.bounds
    return Estimate(value, 0.0 if low == high else None, 0, low, high, kind)


def divided(number: Estimate, size: float, bound: float, *, power: int = 1) -> Estimate:
    """`number / size^power` for a positive size known within a bound."""
    value = number.value / size**power
    if number.low is None or number.high is None:
        return Estimate(value, None, number.num_samples)
    low, high = number.low / (size + bound) ** power, number.high / (size - bound) ** power
    if number.standard_error is None or number.kind in (IntervalKind.bounds, IntervalKind.exact):
        return _between(value, low, high)
    error = number.standard_error / size**power + power * abs(value) * bound / size
    return Estimate(value, error, number.num_samples, min(low, value), max(high, value), number.kind)


def effective_rank(objective: PairObjective, gram: GramSpectrum | None, memory_bytes: int | None) -> Quantity:
    """Entropy rank of the Gauss-Newton matrix (Roy & Vetterli, 2007), exact, from one gradient for each pair.

    `exp(-sum p log p)` with `p = |lambda| / sum |lambda|`.
    The entropy rank of a Hessian depends on its bulk, which few products do not resolve. The Gauss-Newton matrix has no
    more nonzero eigenvalues than the loss has pairs, and one small matrix gives them all.

    Args:
        objective: the loss.
        gram: products of the rows of this matrix, if they are known.
        memory_bytes: most memory for the gradients of all pairs; None is 4 GB.
    """
    if gram is None and objective.group is not None:
        return Quantity(None, "needs all pairs in one process")
    if gram is None:
        rows = CurvatureRows(objective, "gauss_newton", memory_bytes)
        if not rows.fits:
            limit = f"{rows.memory_bytes / 2**30:.2g} GiB"
            reason = f"the gradients of single pairs need more than {limit}; raise memory_gib"
            return Quantity(None, f"{reason}, or take fewer pairs or parameters")
        gram = rows.spectrum(rows.grams([[(0, rows.dimension)]])[0])
    if not gram.values.any():
        return Quantity(None, "every eigenvalue is 0")
    shares = np.abs(gram.values) / np.abs(gram.values).sum()
    value = float(np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum()))
    return Quantity(Estimate(value, 0.0, objective.num_pairs, value, value, IntervalKind.exact), note="Gauss-Newton")


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
        return LocalGeometry(loss, norm, 0.0, rho, math.nan, math.nan, objective.num_pairs)
    direction = gradient / norm
    image = hessian.apply(direction[None])[0]
    curvature = float(direction.double() @ image.double())
    length = float(image.double().norm())
    alignment = curvature / length if length else math.nan
    sharpness = loss_at(objective, rho * direction) - loss
    return LocalGeometry(loss, norm, sharpness, rho, curvature, alignment, objective.num_pairs)


@torch.no_grad()
def loss_at(objective: PairObjective, displacement: Float[Tensor, " parameters"]) -> float:
    """Loss at the weights moved by a vector; the weights themselves are not changed."""
    weights = objective.moved(displacement)
    return objective.summed_shares(
        objective.share(objective.rewards_at(weights, batch), batch) for batch in objective.batches
    )
