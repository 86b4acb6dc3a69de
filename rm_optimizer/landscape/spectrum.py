"""Spectrum of a loss's curvature at one point, with error bounds and the settings behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.by_source import CurvatureByPair, PairCurvatures
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit
from rm_optimizer.landscape.estimates.density import SpectralDensity
from rm_optimizer.landscape.estimates.sharpness import LocalGeometry
from rm_optimizer.records.codec import NOT_STORED, JsonRecord


class SpectrumStatus(StrEnum):
    """End of a computation."""

    complete = "complete"
    """Complete; single values may not have converged."""
    interrupted = "interrupted"
    """Stopped by the user, with the values found until then."""


@dataclass(frozen=True, kw_only=True)
class HessianSpectrum(JsonRecord, indent=2):
    """Eigenvalues of the Hessian, Gauss-Newton or Fisher matrix of a loss over pairs. Derived numbers: `quantities`.

    Args:
        eigenvalues: eigenvalues that were computed, descending.
        residuals: `||A v - lambda v||` of each, plus the possible rounding error if it follows from the iteration.
        error_bounds: distance from each within which an eigenvalue lies: the residual, or `4 residual^2 / gap` if the
            value converged and the gap to the other values is resolved; rounding included.
        converged: True for each value whose residual is within the tolerance, whose magnitude is above the possible
            rounding error of products, and whose rank no further eigenvalue of 0 can change.
        num_top: number of the first values that are the largest of all, with none missing between them.
        num_bottom: number of the last values that are the smallest of all, with none missing between them.
        num_overlooked: number of values, such as copies, that a search after Lanczos added; None if there was no
            search, so that copies may be missing.
        is_exhaustive: True if every unlisted eigenvalue is 0.
        trace: estimate from random vectors, or the trace of the pairs with its interval over pairs, see its `kind`;
            None if it was not estimated.
        density: density of all eigenvalues; None where it was not estimated.
        sampling: the first eigenvalues with their spread over resampled pairs, as many as requested.
        cross_fit: cross-fitted first eigenvalues; None if no error over pairs was requested, or there are too few
            prompts.
        not_cross_fitted: ranks without a cross-fitted value and the reason; empty where all have one.
        geometry: gradient and sharpness at the point; None if not requested.
        matrix: `hessian`, `gauss_newton` or `fisher`.
        method: method of the eigenvalues.
        params: selection of the parameters.
        num_parameters: total number of eigenvalues.
        num_pairs: pairs that the loss is averaged over.
        loss: the loss.
        num_products: number of products with vectors, those of trace and density included.
        product: Hessian-vector product method.
        product_reason: reason of its choice, with the costs of the others.
        gradients_per_product: cost of a product in gradients, where it was measured.
        wall_seconds: total time in seconds.
        dtype: type of the computation.
        seed: seed of all random vectors.
        status: end of the computation.
        by_pair: shares of groups of pairs and of single pairs in the top eigenvalue; None if they are not known.
        source: checkpoint, step and pairs, in words.
        loss_options: options of the loss, as JSON; empty if they are not known, like the next two.
        pairs_digest: digest of the pairs, where one process has all of them.
        weights_digest: digest of the weights.
        pair_curvatures: curvature of each pair along the first eigenvectors, if it was measured; not part of the JSON
            text.
        eigenvectors: one row for each eigenvalue, if they were kept; not part of the JSON text.
    """

    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    error_bounds: tuple[float, ...]
    converged: tuple[bool, ...]
    num_top: int
    num_bottom: int
    num_overlooked: int | None
    is_exhaustive: bool
    trace: Estimate | None
    density: SpectralDensity | None
    sampling: tuple[Estimate, ...]
    cross_fit: CrossFit | None
    geometry: LocalGeometry | None
    matrix: str
    method: str
    params: str
    num_parameters: int
    num_pairs: int
    loss: float
    num_products: int
    product: str
    product_reason: str
    gradients_per_product: float | None
    wall_seconds: float
    dtype: str
    seed: int
    status: SpectrumStatus = SpectrumStatus.complete
    by_pair: CurvatureByPair | None = None
    source: str = ""
    loss_options: str = ""
    pairs_digest: str = ""
    weights_digest: str = ""
    not_cross_fitted: str = ""
    pair_curvatures: PairCurvatures | None = field(default=None, compare=False, repr=False, metadata=NOT_STORED)
    eigenvectors: Float[Tensor, "vectors parameters"] | None = field(
        default=None, compare=False, repr=False, metadata=NOT_STORED
    )
