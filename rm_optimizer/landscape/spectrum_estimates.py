"""Estimates beside the eigenvalues: trace, density, sampling error, and the geometry of the point."""

from __future__ import annotations

from collections.abc import Sequence

from rm_optimizer.landscape.estimates.by_source import PairCurvatures, pair_indices
from rm_optimizer.landscape.estimates.cross_fitting import cross_fit_hessian, weights_of
from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.estimates.sampling import pair_curvatures, sampling_error
from rm_optimizer.landscape.estimates.sharpness import local_geometry
from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.operators.base import HessianOperator, LossOperator
from rm_optimizer.landscape.solve import Solution, SpectrumOptions
from rm_optimizer.landscape.solvers.overlooked import with_overlooked


def add_estimates(
    operator: LossOperator,
    found: Solution,
    options: SpectrumOptions,
    *,
    seed: int,
    clusters: Sequence[int] | None = None,
) -> None:
    """Add the requested estimates that the solver did not give, unless it was interrupted.

    Where random vectors follow anyway, or Lanczos started from earlier vectors, eigenvalues that it overlooked are
    looked for. After Ctrl-C the estimates so far stay, and the solution is marked as interrupted.

    Args:
        operator: the matrix.
        found: its eigenvalues.
        options: requested estimates.
        seed: of resampling; random vectors take the next one.
        clusters: number of each pair's prompt, in the order of the batches.
    """
    if found.is_interrupted:
        return
    try:
        _estimate(operator, found, options, seed, clusters)
    except KeyboardInterrupt:
        found.is_interrupted = True


def _estimate(
    operator: LossOperator, found: Solution, options: SpectrumOptions, seed: int, clusters: Sequence[int] | None
) -> None:
    is_hessian = isinstance(operator, HessianOperator)
    if options.sam_rho and is_hessian:
        found.geometry = local_geometry(operator.objective, operator, rho=options.sam_rho)
    if found.searched and (options.trace_products or options.density_probes or found.is_warm):
        found.pairs = with_overlooked(operator, found.pairs, found.searched, tolerance=options.tolerance, seed=seed + 2)
    pairs = found.pairs
    removable = pairs if pairs.is_orthonormal and len(pairs.vectors) == len(pairs.values) else None
    sampled = min(options.num_sampled, len(pairs.vectors))
    if sampled and not found.sampling and isinstance(operator, HessianOperator):
        objective = operator.objective
        curvatures = pair_curvatures(objective, pairs.vectors[:sampled], pairs.values[:sampled].tolist())
        found.sampling = sampling_error(objective, curvatures, clusters=clusters, seed=seed)
        found.pair_curvatures = PairCurvatures(
            curvatures.cpu().numpy(), weights_of(objective), pair_indices(objective.batches)
        )
        if options.which != "smallest":
            found.cross_fit = cross_fit_hessian(
                operator,
                sampled,
                top=float(pairs.values[0]),
                sampling=found.sampling,
                clusters=clusters,
                seed=seed,
                state_file=options.state_file,
            )
    if options.density_probes:
        found.density = spectral_density(
            operator, num_probes=options.density_probes, num_steps=options.density_steps, seed=seed + 1, found=removable
        )
        found.trace = found.trace or found.density.moment(1)
    if found.trace is None and options.trace_products:
        found.trace = estimate_trace(
            operator,
            options.trace_method,
            options.trace_products,
            seed=seed + 1,
            found=removable,
            is_semidefinite=not is_hessian,
        )
