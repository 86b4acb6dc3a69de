"""Spectrum of a loss's curvature at one point with the settings behind it, and the comparison of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.estimates.by_pair import CurvatureByPair, PairCurvatures
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


@dataclass(frozen=True)
class SpectrumComparison(JsonRecord):
    """Changes from one spectrum to another.

    Args:
        ratios: largest eigenvalues of the second divided by those of the first; NaN if the first is 0.
        bottom_ratios: the same ratios for the smallest ones, the smallest first.
        trace_ratio: ratio of the traces; None where either is missing or the first is 0.
        subspace_overlap: `||V_1 V_2^T||_F^2 / k` of the top k eigenvectors, 1 where both span the same space and about
            k / parameters for independent spaces; None if eigenvectors were not kept.
        num_compared: number of compared eigenvalues, k.
        num_pairs: number of pairs of each spectrum.
    """

    ratios: tuple[float, ...]
    bottom_ratios: tuple[float, ...]
    trace_ratio: float | None
    subspace_overlap: float | None
    num_compared: int
    num_pairs: tuple[int, int]


def compare_spectra(first: HessianSpectrum, second: HessianSpectrum, *, top_k: int | None = None) -> SpectrumComparison:
    """Compare eigenvalues, trace and top subspace of two spectra.

    Args:
        first: the reference, such as an earlier step of a run.
        second: spectrum of the same matrix over the same parameters, of the same loss and pairs at other weights.
        top_k: number of eigenvalues to compare at each end; None takes as many as both spectra have.

    Raises:
        ConfigError: if they are of different matrices, parameters, losses or pairs, or do not both have the k largest
            eigenvalues.
    """
    kinds = [(spectrum.matrix, spectrum.params, spectrum.num_parameters) for spectrum in (first, second)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"spectra to compare must be of the same matrix and parameters, got {kinds[0]} and {kinds[1]}"
        )
    for what, one, other in (
        ("loss options", first.loss_options, second.loss_options),
        ("pairs", first.pairs_digest, second.pairs_digest),
    ):
        if one and other and one != other:
            raise ConfigError(f"spectra to compare must be of the same {what}, got {one} and {other}; measure one anew")
    available = min(first.num_top, second.num_top)
    count = available if top_k is None else top_k
    if not 1 <= count <= available:
        raise ConfigError(f"top_k must lie in [1, {available}], the largest eigenvalues of both spectra, got {count}")
    at_bottom = min(first.num_bottom, second.num_bottom, count)
    return SpectrumComparison(
        ratios=_ratios(second.eigenvalues[:count], first.eigenvalues[:count]),
        bottom_ratios=_ratios(second.eigenvalues[::-1][:at_bottom], first.eigenvalues[::-1][:at_bottom]),
        trace_ratio=_trace_ratio(first, second),
        subspace_overlap=_overlap(first, second, count),
        num_compared=count,
        num_pairs=(first.num_pairs, second.num_pairs),
    )


def _ratios(new: Sequence[float], old: Sequence[float]) -> tuple[float, ...]:
    return tuple(after / before if before else float("nan") for after, before in zip(new, old, strict=True))


def _trace_ratio(first: HessianSpectrum, second: HessianSpectrum) -> float | None:
    if first.trace is None or second.trace is None or first.trace.value == 0:
        return None
    return second.trace.value / first.trace.value


def _overlap(first: HessianSpectrum, second: HessianSpectrum, count: int) -> float | None:
    if first.eigenvectors is None or second.eigenvectors is None:
        return None
    products = (
        first.eigenvectors[:count].double() @ second.eigenvectors[:count].double().to(first.eigenvectors.device).T
    )
    return float(torch.as_tensor(products).square().sum() / count)
