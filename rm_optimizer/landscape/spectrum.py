"""Spectrum of a loss's curvature at one point, with the settings behind it and the numbers derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.landscape.estimates.by_pair import CurvatureByPair, PairCurvatures
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit
from rm_optimizer.landscape.estimates.density import Combine, SpectralDensity, Terms
from rm_optimizer.landscape.estimates.quantities import LocalGeometry, Quantity, divided, within
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import NOT_STORED

_BY_MAGNITUDE = ("power_iteration", "pyhessian")
_SEMIDEFINITE = ("gauss_newton", "fisher")
_NEEDS_ALL = (
    "needs all eigenvalues or a density: use method=full, method=gauss_newton_exact, or --type density (with_density)"
)
_NO_TOP = "the largest eigenvalue was not computed; use which=both or largest"


class SpectrumStatus(StrEnum):
    """End of a computation."""

    complete = "complete"
    """Complete; single values may not have converged."""
    interrupted = "interrupted"
    """Stopped by the user, with the values found until then."""


@dataclass(frozen=True, kw_only=True)
class HessianSpectrum(LandscapeRecord, indent=2):
    """Eigenvalues of the Hessian, Gauss-Newton or Fisher matrix of a loss over pairs.

    Numbers derived from it, such as `condition_number`, are NaN where they are not known. `quantities` has their
    errors, or the reason why a number is missing.

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
        num_products: number of products with vectors, including trace and density.
        product: Hessian-vector product method.
        product_reason: reason of its choice, with the costs of the others.
        gradients_per_product: cost of a product in gradients, where it was measured.
        wall_seconds: total time in seconds.
        dtype: type of the computation.
        seed: seed of all random vectors.
        status: end of the computation.
        by_pair: shares of groups of pairs and of single pairs in the top eigenvalue; None if they are not known.
        gauss_newton_rank: effective rank of the Gauss-Newton matrix, or the reason why it is not known; None if not
            requested.
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
    gauss_newton_rank: Quantity | None = None
    source: str = ""
    loss_options: str = ""
    pairs_digest: str = ""
    weights_digest: str = ""
    not_cross_fitted: str = ""
    pair_curvatures: PairCurvatures | None = field(default=None, compare=False, repr=False, metadata=NOT_STORED)
    eigenvectors: Float[Tensor, "vectors parameters"] | None = field(
        default=None, compare=False, repr=False, metadata=NOT_STORED
    )

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Each derived number by name, with its error, or the reason why it is missing."""
        rank = self.gauss_newton_rank or Quantity(None, "it was not computed; set effective_rank=True")
        return {name: quantity(self) for name, quantity in SUMMARY.items()} | {"effective_rank": rank}

    @property
    def top_eigenvalue(self) -> float:
        """The largest eigenvalue."""
        return self.eigenvalues[0] if self.num_top else math.nan

    @property
    def trace_estimate(self) -> float:
        """The trace; `trace` has its error."""
        return math.nan if self.trace is None else self.trace.value

    @property
    def condition_number(self) -> float:
        """`|lambda|_1 / |lambda|_k` of eigenvalues by magnitude, where `k` is the last one whose rank is known."""
        return condition_number(self).number

    @property
    def effective_rank(self) -> float:
        """Entropy rank of the Gauss-Newton matrix: the number of directions that pairs curve the loss in."""
        return self.quantities["effective_rank"].number

    @property
    def sharpness_score(self) -> float:
        """`lambda_max / trace`: share of one direction in the total curvature."""
        return sharpness_score(self).number

    @property
    def flatness_index(self) -> float:
        """`1 / lambda_max`."""
        return flatness(self).number

    def summary(self) -> dict[str, str]:
        """Size of the computation, and derived numbers with errors or the reason for their absence."""
        found = self.quantities
        return {
            "matrix": f"{self.matrix} by {self.method}, {self.status}",
            "eigenvalues": f"{len(self.eigenvalues):,} of {self.num_parameters:,}; {self.num_pairs:,} pairs",
            "top_eigenvalue": f"{self.top_eigenvalue:.5g}",
            "trace_estimate": Quantity(self.trace, "not estimated").text,
            "condition_number": found["condition_number"].text,
            "effective_rank": found["effective_rank"].text,
            "sharpness_score": found["sharpness_score"].text,
            "flatness_index": found["flatness"].text,
        }


def condition_number(spectrum: HessianSpectrum) -> Quantity:
    """`|lambda|_1 / |lambda|_k` of eigenvalues by magnitude, where `k` is the last one whose rank is known.

    If `|lambda|_k` is at most twice its error bound, only a lower limit of the ratio is known. The estimate is then
    that limit, without an upper end.
    """
    largest = _largest(spectrum)
    if isinstance(largest, str):
        return Quantity(None, largest)
    ranked = _ranked(spectrum)
    if len(ranked) < 2:
        return Quantity(None, f"needs two eigenvalues whose rank by magnitude is known, got {len(ranked)}; raise top_k")
    (size, bound), note = ranked[-1], f"|lambda|_1 / |lambda|_k, k = {len(ranked)}"
    if size <= 2 * bound:
        limit = (largest[0] - largest[1]) / (size + bound)
        is_exact = spectrum.method in ("full", "gauss_newton_exact")  # to rounding, not iterated to a tolerance
        why = f"limit of {spectrum.dtype}" if is_exact else "error bound"
        return Quantity(Estimate(limit, None, 0, limit, None, IntervalKind.bounds), note=f"{note}, {why}")
    return Quantity(divided(within(*largest), size, bound), note=note)


def top_ratio(spectrum: HessianSpectrum) -> Quantity:
    """`lambda_1 / lambda_5`: the largest eigenvalue relative to the fifth."""
    top = _top(spectrum)
    if len(top) < 5:
        return Quantity(None, f"needs the five largest eigenvalues, and {len(top)} were computed; raise top_k")
    if top[4][0] <= 2 * top[4][1]:
        return Quantity(None, "the fifth eigenvalue is not positive beyond twice its error bound")
    return Quantity(divided(within(*top[0]), *top[4]))


def flatness(spectrum: HessianSpectrum) -> Quantity:
    """`1 / lambda_max`."""
    top = _top(spectrum)
    if not top:
        return Quantity(None, _NO_TOP)
    if top[0][0] <= 2 * top[0][1]:
        return Quantity(None, "the largest eigenvalue is not positive beyond twice its error bound")
    return Quantity(divided(within(1.0, 0.0), *top[0]))


def sharpness_score(spectrum: HessianSpectrum) -> Quantity:
    """`lambda_max / trace`: share of one direction in the total curvature.

    Standard error and interval come from the trace; the interval is widened by the eigenvalue's error bound.
    """
    trace, top = spectrum.trace, _top(spectrum)
    if trace is None:
        return Quantity(None, "no trace was estimated; set num_probes")
    if not top:
        return Quantity(None, _NO_TOP)
    if trace.standard_error is None or trace.low is None or trace.high is None:
        return Quantity(None, "the trace has no interval; raise num_probes")
    if trace.low <= 0:
        return Quantity(None, "the interval of the trace is not positive, so a share of it is not defined")
    largest, bound = top[0]
    score = largest / trace.value
    ends = [(largest + side * bound) / end for side in (-1, 1) for end in (trace.low, trace.high)]
    error = abs(score) * trace.standard_error / trace.value
    kind = IntervalKind.bounds if trace.kind == IntervalKind.exact else trace.kind
    return Quantity(Estimate(score, error, trace.num_samples, min(ends), max(ends), kind))


def entropy_rank(spectrum: HessianSpectrum) -> Quantity:
    """`exp(-sum p log p)` with `p = |lambda| / sum |lambda|` (Roy & Vetterli, 2007)."""

    def combine(totals: np.ndarray) -> np.ndarray:
        size, weighted_log = totals
        return np.asarray(np.exp(np.log(size) - weighted_log / size))

    return _resolved(
        _of_all(spectrum, lambda v: np.stack([np.abs(v), np.abs(v) * np.log(np.maximum(np.abs(v), 1e-300))]), combine)
    )


def participation_rank(spectrum: HessianSpectrum) -> Quantity:
    """`(sum |lambda|)^2 / sum lambda^2`: number of equal eigenvalues with the same ratio."""
    return _resolved(
        _of_all(spectrum, lambda v: np.stack([np.abs(v), v**2]), lambda totals: totals[0] ** 2 / totals[1])
    )


def stable_rank(spectrum: HessianSpectrum) -> Quantity:
    """`||A||_F^2 / |lambda|max^2`."""
    return _per_largest(spectrum, lambda v: v[None] ** 2, power=2)


def frobenius_norm(spectrum: HessianSpectrum) -> Quantity:
    """`||A||_F`, the root of the sum of squares."""
    return _of_all(spectrum, lambda v: v[None] ** 2, lambda totals: np.sqrt(totals[0]))


def intrinsic_dimension(spectrum: HessianSpectrum) -> Quantity:
    """`sum |lambda| / |lambda|max`."""
    return _per_largest(spectrum, lambda v: np.abs(v)[None], power=1)


def negative_share(spectrum: HessianSpectrum) -> Quantity:
    """Share of the total magnitude that lies in negative eigenvalues."""
    return _of_all(spectrum, lambda v: np.stack([np.abs(v) * (v < 0), np.abs(v)]), lambda totals: totals[0] / totals[1])


SUMMARY: dict[str, Callable[[HessianSpectrum], Quantity]] = {
    "condition_number": condition_number,
    "top_ratio": top_ratio,
    "flatness": flatness,
    "sharpness_score": sharpness_score,
    "frobenius_norm": frobenius_norm,
    "entropy_rank": entropy_rank,
    "participation_rank": participation_rank,
    "stable_rank": stable_rank,
    "intrinsic_dimension": intrinsic_dimension,
    "negative_share": negative_share,
}
"""Quantities that need no further argument, by name."""


def summarize(spectrum: HessianSpectrum) -> dict[str, Quantity]:
    """Every derived number of a spectrum, as its `quantities` has them."""
    return spectrum.quantities


def _has_all(spectrum: HessianSpectrum) -> bool:
    """True if every eigenvalue is listed or is 0."""
    return spectrum.is_exhaustive or len(spectrum.eigenvalues) == spectrum.num_parameters


def _listed(spectrum: HessianSpectrum) -> list[tuple[float, float]]:
    return list(zip(spectrum.eigenvalues, spectrum.error_bounds, strict=True))


def _ranked(spectrum: HessianSpectrum) -> list[tuple[float, float]]:
    """Largest magnitudes without a gap, descending, with their error bounds.

    Unlisted eigenvalues lie between the last of the top and the first of the bottom. So their magnitudes are at most
    the larger magnitude of these two.
    """
    sizes = sorted(((abs(value), bound) for value, bound in _listed(spectrum)), reverse=True)
    if _has_all(spectrum) or spectrum.method in _BY_MAGNITUDE:
        return sizes
    inner = [spectrum.eigenvalues[spectrum.num_top - 1]] if spectrum.num_top else []
    inner += [spectrum.eigenvalues[-spectrum.num_bottom]] if spectrum.num_bottom else []
    return [(size, bound) for size, bound in sizes if size >= max(map(abs, inner))]


def _top(spectrum: HessianSpectrum) -> list[tuple[float, float]]:
    """The largest eigenvalues without a gap, with their error bounds."""
    listed = _listed(spectrum)
    return listed if _has_all(spectrum) else listed[: spectrum.num_top]


def _largest(spectrum: HessianSpectrum) -> tuple[float, float] | str:
    """`|lambda|max` with its error bound, or the reason why it is not known."""
    if not spectrum.eigenvalues:
        return "no eigenvalue was computed"
    has_ends = spectrum.num_top > 0 and (spectrum.num_bottom > 0 or spectrum.matrix in _SEMIDEFINITE)
    if not (has_ends or _has_all(spectrum) or spectrum.method in _BY_MAGNITUDE):
        end = "top" if spectrum.num_top else "bottom"
        return f"|lambda|max may lie at either end of the spectrum, and only its {end} was computed; use which=both"
    size, bound = max(((abs(value), bound) for value, bound in _listed(spectrum)))
    if size <= 2 * bound:
        return "no eigenvalue is larger than twice its error bound"
    return size, bound


def _of_all(spectrum: HessianSpectrum, terms: Terms, combine: Combine) -> Quantity:
    """Function of totals over all eigenvalues; zeros add nothing to any of the terms in use."""
    if not _has_all(spectrum):
        density = spectrum.density
        return Quantity(None, _NEEDS_ALL) if density is None else Quantity(density.statistic(terms, combine))
    values, bounds = np.array(spectrum.eigenvalues), np.array(spectrum.error_bounds)
    if not values.any():
        return Quantity(None, "every eigenvalue is 0")
    each = terms(values)
    totals = each.sum(axis=1)
    value = float(combine(totals))
    # the error is the sum of the changes by each eigenvalue's error bound
    changes = [np.abs(combine(totals[:, None] + terms(values + moved) - each) - value) for moved in (bounds, -bounds)]
    return Quantity(within(value, float(np.maximum(*changes).sum())))


def _per_largest(spectrum: HessianSpectrum, terms: Terms, *, power: int) -> Quantity:
    largest = _largest(spectrum)
    if isinstance(largest, str):
        return Quantity(None, largest)
    total = _of_all(spectrum, terms, lambda totals: totals[0])
    return total if total.estimate is None else _resolved(Quantity(divided(total.estimate, *largest, power=power)))


def _resolved(rank: Quantity) -> Quantity:
    """The rank, or none if its error is more than half of it or its interval contains 0."""
    found = rank.estimate
    if found is None:
        return rank
    ends = (found.low, found.high)
    half = 0.0 if None in ends else (ends[1] - ends[0]) / 2  # type: ignore[operator]
    error = half if found.standard_error is None else found.standard_error
    if error <= found.value / 2 and (found.low is None or found.low > 0):
        return rank
    remedy = "raise num_probes and probe_steps" if found.num_samples else "compute in float64"
    return Quantity(None, f"not resolved, {found.value:.3g} with an error of {error:.2g}; {remedy}")
