"""Estimates beside the eigenvalues: trace, density, sampling error, and the geometry of the point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.density import SpectralDensity, spectral_density
from rm_optimizer.landscape.estimates.sampling import sampling_error
from rm_optimizer.landscape.estimates.sharpness import LocalGeometry, local_geometry
from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.operators.base import HessianOperator, LossOperator
from rm_optimizer.landscape.solve import Solution, SpectrumOptions


@dataclass
class SpectrumEstimates:
    """Estimates beside the eigenvalues; see the fields of `HessianSpectrum`."""

    trace: Estimate | None = None
    density: SpectralDensity | None = None
    sampling: tuple[Estimate, ...] = ()
    geometry: LocalGeometry | None = None


def with_estimates(
    operator: LossOperator,
    found: Solution,
    options: SpectrumOptions,
    *,
    seed: int,
    clusters: Sequence[int] | None = None,
) -> tuple[Solution, SpectrumEstimates]:
    """Add the requested estimates that the solver did not give.

    After Ctrl-C it returns the estimates so far, with the solution marked as interrupted.

    Args:
        operator: the matrix.
        found: its eigenvalues.
        options: requested estimates.
        seed: of resampling; random vectors take the next one.
        clusters: number of each pair's prompt, in the order of the batches.
    """
    estimates = SpectrumEstimates(trace=found.trace, sampling=found.sampling)
    if found.is_interrupted:
        return found, estimates
    try:
        _estimate(operator, found, estimates, options, seed, clusters)
    except KeyboardInterrupt:
        return replace(found, is_interrupted=True), estimates
    return found, estimates


def _estimate(
    operator: LossOperator,
    found: Solution,
    estimates: SpectrumEstimates,
    options: SpectrumOptions,
    seed: int,
    clusters: Sequence[int] | None,
) -> None:
    pairs, is_hessian = found.pairs, isinstance(operator, HessianOperator)
    removable = pairs if pairs.is_orthonormal and len(pairs.vectors) == len(pairs.values) else None
    if options.sam_rho and is_hessian:
        estimates.geometry = local_geometry(operator.objective, operator, rho=options.sam_rho)
    sampled = min(options.num_sampled, len(pairs.vectors))
    if sampled and not estimates.sampling and is_hessian:
        estimates.sampling = sampling_error(operator.objective, pairs.vectors[:sampled], clusters=clusters, seed=seed)
    if options.density_probes:
        estimates.density = spectral_density(
            operator,
            num_probes=options.density_probes,
            num_steps=options.density_steps,
            seed=seed + 1,
            found=removable,
        )
        estimates.trace = estimates.trace or estimates.density.moment(1)
    if estimates.trace is None and options.trace_products:
        estimates.trace = estimate_trace(
            operator, options.trace_method, options.trace_products, seed=seed + 1, found=removable
        )
