"""Comparison of two spectra of one matrix at different weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.records.codec import JsonRecord


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
    overlap, trace_ratio = None, None
    if first.eigenvectors is not None and second.eigenvectors is not None:
        old, new = (each[:count].double() for each in (first.eigenvectors, second.eigenvectors))
        overlap = float((old @ new.to(old.device).T).square().sum() / count)
    if first.trace is not None and second.trace is not None and first.trace.value:
        trace_ratio = second.trace.value / first.trace.value
    return SpectrumComparison(
        ratios=_ratios(second.eigenvalues[:count], first.eigenvalues[:count]),
        bottom_ratios=_ratios(second.eigenvalues[::-1][:at_bottom], first.eigenvalues[::-1][:at_bottom]),
        trace_ratio=trace_ratio,
        subspace_overlap=overlap,
        num_compared=count,
        num_pairs=(first.num_pairs, second.num_pairs),
    )


def _ratios(new: Sequence[float], old: Sequence[float]) -> tuple[float, ...]:
    return tuple(after / before if before else float("nan") for after, before in zip(new, old, strict=True))
