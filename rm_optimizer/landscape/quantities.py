"""Numbers made of a spectrum that people quote, each defined, and None with a reason where it cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.estimate import Estimate
from rm_optimizer.landscape.density import Combine, Terms
from rm_optimizer.landscape.spectrum import HessianSpectrum

_NEEDS_ALL = (
    "needs all eigenvalues or a density: use method=full, method=gauss_newton_exact, or density_probes (--type density)"
)


@dataclass(frozen=True)
class Quantity:
    """A derived number, or why there is none.

    Args:
        estimate: the number; its standard error is 0 where it is exact, None where unknown.
        reason: why there is none.
    """

    estimate: Estimate | None
    reason: str | None = None

    @property
    def value(self) -> float | None:
        """The number alone."""
        return None if self.estimate is None else self.estimate.value


def condition_number(spectrum: HessianSpectrum) -> Quantity:
    """`|lambda|max` over the smallest resolved magnitude among the eigenvalues computed.

    An eigenvalue is resolved if its magnitude is more than twice its error bound. The smallest of all is not meant:
    with more parameters than the data constrain it is 0 to rounding, and the ratio to it says nothing.
    """
    pairs = zip(spectrum.eigenvalues, spectrum.error_bounds, strict=True)
    resolved = [abs(value) for value, bound in pairs if abs(value) > 2 * bound]
    if len(resolved) < 2:
        return Quantity(None, "fewer than two eigenvalues are larger than twice their error bounds")
    return _exact(spectrum, max(resolved) / min(resolved))


def top_ratio(spectrum: HessianSpectrum) -> Quantity:
    """`lambda_1 / lambda_5`: how far the largest stands out."""
    if len(spectrum.eigenvalues) < 5:
        return Quantity(None, f"needs five eigenvalues, and {len(spectrum.eigenvalues)} were computed; raise top_k")
    if spectrum.eigenvalues[4] <= 2 * spectrum.error_bounds[4]:
        return Quantity(None, "the fifth eigenvalue is not positive beyond twice its error bound")
    return _exact(spectrum, spectrum.eigenvalues[0] / spectrum.eigenvalues[4])


def flatness(spectrum: HessianSpectrum) -> Quantity:
    """`1 / lambda_max`."""
    if not spectrum.eigenvalues or spectrum.eigenvalues[0] <= 2 * spectrum.error_bounds[0]:
        return Quantity(None, "the largest eigenvalue is not positive beyond twice its error bound")
    return _exact(spectrum, 1 / spectrum.eigenvalues[0])


def sharpness_score(spectrum: HessianSpectrum) -> Quantity:
    """`lambda_max / trace`: the share of the total curvature that one direction has."""
    trace = spectrum.trace
    if trace is None:
        return Quantity(None, "no trace was estimated; set trace_products or density_probes")
    error = trace.standard_error
    if error is None or trace.value <= 2 * error:
        return Quantity(
            None, "the trace is not positive beyond twice its standard error, so a share of it is not defined"
        )
    if not spectrum.eigenvalues:
        return Quantity(None, "no eigenvalue was computed")
    value = spectrum.eigenvalues[0] / trace.value
    return Quantity(Estimate(value, value * error / trace.value, trace.num_samples))


def entropy_rank(spectrum: HessianSpectrum) -> Quantity:
    """`exp(-sum p log p)` with `p = |lambda| / sum |lambda|` (Roy & Vetterli, 2007)."""

    def combine(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        size, weighted_log = totals
        return np.asarray(np.exp(np.log(size) - weighted_log / size))

    return _of_all(
        spectrum, lambda v: np.stack([np.abs(v), np.abs(v) * np.log(np.maximum(np.abs(v), 1e-300))]), combine
    )


def participation_rank(spectrum: HessianSpectrum) -> Quantity:
    """`(sum |lambda|)^2 / sum lambda^2`: how many eigenvalues of one size would spread alike."""
    return _of_all(spectrum, lambda v: np.stack([np.abs(v), v**2]), lambda totals: totals[0] ** 2 / totals[1])


def stable_rank(spectrum: HessianSpectrum) -> Quantity:
    """`||A||_F^2 / |lambda|max^2`."""
    return _per_largest(spectrum, lambda v: v[None] ** 2, power=2)


def intrinsic_dimension(spectrum: HessianSpectrum) -> Quantity:
    """`sum |lambda| / |lambda|max`."""
    return _per_largest(spectrum, lambda v: np.abs(v)[None], power=1)


def negative_share(spectrum: HessianSpectrum) -> Quantity:
    """Share of the total magnitude that lies in negative eigenvalues."""
    return _of_all(spectrum, lambda v: np.stack([np.abs(v) * (v < 0), np.abs(v)]), lambda totals: totals[0] / totals[1])


def effective_parameters(spectrum: HessianSpectrum, threshold: float) -> Quantity:
    """`sum |lambda| / (|lambda| + z)`: how many directions are curved beyond a threshold `z` (MacKay, 1992)."""
    return _of_all(spectrum, lambda v: (np.abs(v) / (np.abs(v) + threshold))[None], lambda totals: totals[0])


def num_above(spectrum: HessianSpectrum, threshold: float) -> Quantity:
    """Number of eigenvalues above a positive threshold.

    Known exactly where all are, or where the eigenvalues from the top reach below the threshold.
    """
    count = float(sum(value > threshold for value in spectrum.eigenvalues))
    falls_below = [value for value in spectrum.eigenvalues if value <= threshold]
    if spectrum.is_exhaustive and threshold >= 0:
        return _exact(spectrum, count)
    if falls_below and falls_below[0] > 0:
        return _exact(spectrum, count)
    if spectrum.density is None:
        return Quantity(None, f"the eigenvalues computed do not reach below {threshold}; raise top_k or {_NEEDS_ALL}")
    return _of_all(spectrum, lambda v: (v > threshold)[None].astype(float), lambda totals: totals[0])


SUMMARY: dict[str, Callable[[HessianSpectrum], Quantity]] = {
    "condition_number": condition_number,
    "top_ratio": top_ratio,
    "flatness": flatness,
    "sharpness_score": sharpness_score,
    "entropy_rank": entropy_rank,
    "participation_rank": participation_rank,
    "stable_rank": stable_rank,
    "intrinsic_dimension": intrinsic_dimension,
    "negative_share": negative_share,
}
"""The quantities that need no further number, by name."""


def summarise(spectrum: HessianSpectrum) -> dict[str, Quantity]:
    """Every quantity of `SUMMARY`."""
    return {name: quantity(spectrum) for name, quantity in SUMMARY.items()}


def _exact(spectrum: HessianSpectrum, value: float) -> Quantity:
    return Quantity(Estimate(value, 0.0, spectrum.num_pairs))


def _of_all(spectrum: HessianSpectrum, terms: Terms, combine: Combine) -> Quantity:
    """A function of totals over all eigenvalues; zeros add nothing to any term here."""
    values = np.array(spectrum.eigenvalues)
    if spectrum.is_exhaustive:
        if not values.any():
            return Quantity(None, "every eigenvalue is 0")
        return _exact(spectrum, float(combine(terms(values).sum(axis=1))))
    if spectrum.density is None:
        return Quantity(None, _NEEDS_ALL)
    return Quantity(spectrum.density.statistic(terms, combine))


def _per_largest(spectrum: HessianSpectrum, terms: Terms, *, power: int) -> Quantity:
    largest = max(map(abs, spectrum.eigenvalues), default=0.0)
    if largest == 0:
        return Quantity(None, "no eigenvalue other than 0 was computed")
    return _of_all(spectrum, terms, lambda totals: totals[0] / largest**power)
