"""Estimates in addition to eigenvalues: trace, density, sampling error, and the local geometry of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rm_optimizer.landscape.estimates.by_source import PairCurvatures, pair_indices
from rm_optimizer.landscape.estimates.cross_fitting import (
    cross_fit_gram,
    cross_fit_hessian,
    not_cross_fitted,
    num_prompts,
    weights_of,
)
from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.estimates.sampling import pair_curvatures, sampling_error
from rm_optimizer.landscape.estimates.sharpness import local_geometry
from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, HessianOperator, LossOperator, OutputOperator
from rm_optimizer.landscape.operators.gauss_newton import gauss_newton_exact
from rm_optimizer.landscape.operators.products import KeptGraph
from rm_optimizer.landscape.solve import Solution, SpectrumOptions, known_ends, memory_of_vectors
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs
from rm_optimizer.landscape.solvers.overlooked import with_overlooked


def add_estimates(
    operator: LossOperator,
    found: Solution,
    method: str,
    options: SpectrumOptions,
    *,
    seed: int,
    clusters: Sequence[int] | None = None,
) -> None:
    """Add the requested estimates that the solver did not give, unless it was interrupted.

    Eigenvalues that Lanczos overlooked are searched for. After Ctrl-C the finished estimates stay, and the solution is
    marked as interrupted.

    Args:
        operator: the matrix.
        found: its eigenvalues.
        method: method of the eigenvalues.
        options: requested estimates.
        seed: seed of the resampling; random vectors take the next one.
        clusters: number of each pair's prompt, in the order of the batches.
    """
    found.not_cross_fitted = "the analysis was interrupted before it"
    if found.is_interrupted:
        return
    try:
        _estimate(operator, found, method, options, seed, clusters)
    except KeyboardInterrupt:
        found.is_interrupted = True


def _estimate(
    operator: LossOperator,
    found: Solution,
    method: str,
    options: SpectrumOptions,
    seed: int,
    clusters: Sequence[int] | None,
) -> None:
    is_hessian = isinstance(operator, HessianOperator)
    if options.sam_rho and is_hessian:
        found.geometry = local_geometry(operator.objective, operator, rho=options.sam_rho)
    if found.searched:
        found.pairs = with_overlooked(operator, found.pairs, found.searched, tolerance=options.tolerance, seed=seed + 2)
    _add_sampling(operator, found, method, options, seed, clusters)
    pairs = found.pairs
    removable = pairs if pairs.is_orthonormal and len(pairs.vectors) == len(pairs.values) else None
    if options.density_probes:
        found.density = spectral_density(
            operator,
            num_probes=options.density_probes,
            num_steps=options.density_steps,
            seed=seed + 1,
            found=removable,
            at_once=_probes_at_once(operator, options, pairs),
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


def _probes_at_once(operator: LossOperator, options: SpectrumOptions, pairs: Eigenpairs) -> int:
    """Number of random vectors whose Lanczos bases fit into memory together; 1 if products have nothing to share."""
    if isinstance(operator, HessianOperator) and operator.product == KeptGraph.name:
        return 1
    basis = (options.density_steps + 1) * operator.dimension * torch.finfo(operator.dtype).bits // 8
    room = memory_of_vectors(operator.device, options) - pairs.vectors.nbytes
    return max(1, min(VECTORS_AT_ONCE, room // basis))


def _add_sampling(
    operator: LossOperator,
    found: Solution,
    method: str,
    options: SpectrumOptions,
    seed: int,
    clusters: Sequence[int] | None,
) -> None:
    """Add the errors of the first eigenvalues over pairs, and cross-fitted values of the largest ones."""
    num_values = len(found.pairs.values)
    num_top, num_bottom = known_ends(found.pairs.values.tolist(), method, options.which)
    num_nonzero = _num_nonzero(found.pairs)
    listed = min(len(found.pairs.vectors), num_nonzero)
    sampled = min(options.num_sampled, listed, num_top) if num_top else min(options.num_sampled, listed)
    if sampled and isinstance(operator, OutputOperator):
        _sample_gram(operator, found, sampled, options, seed, clusters)
    elif sampled and isinstance(operator, HessianOperator):
        _sample_hessian(operator, found, sampled, options, seed, clusters, is_top=num_top > 0)
    found.not_cross_fitted = not_cross_fitted(
        num_top,
        options.num_sampled,
        num_nonzero,
        num_prompts(operator.objective.num_pairs, clusters),
        found.cross_fit,
        lists_smallest=num_top < num_values and num_bottom > 0,
    )


def _num_nonzero(pairs: Eigenpairs) -> int:
    """Number of the first eigenvalues that lie further from 0 than their error bounds."""
    is_zero = (pairs.values.abs() <= pairs.error_bounds).tolist()
    return is_zero.index(True) if True in is_zero else len(is_zero)


def _sample_gram(
    operator: OutputOperator,
    found: Solution,
    count: int,
    options: SpectrumOptions,
    seed: int,
    clusters: Sequence[int] | None,
) -> None:
    """Add errors over pairs from the gradients of single pairs; they do not depend on the method of the eigenvalues."""
    gram = found.gram or gauss_newton_exact(
        operator.objective, curvature=operator.curvature, memory_bytes=options.memory_bytes
    )
    count = min(count, len(gram.values))
    *found.sampling, found.trace = gram.bootstrap(count, clusters=clusters, seed=seed)
    found.cross_fit = cross_fit_gram(gram, count, clusters=clusters, seed=seed)
    everything = np.arange(gram.num_pairs)
    along, indices = gram.curvatures(everything, everything, count), pair_indices(operator.objective.batches)
    found.pair_curvatures = PairCurvatures(along, gram.pair_weights, indices, gram)


def _sample_hessian(
    operator: HessianOperator,
    found: Solution,
    count: int,
    options: SpectrumOptions,
    seed: int,
    clusters: Sequence[int] | None,
    *,
    is_top: bool,
) -> None:
    """Add errors over pairs from second derivatives of single pairs along the vectors."""
    objective, pairs = operator.objective, found.pairs
    curvatures = pair_curvatures(objective, pairs.vectors[:count], pairs.values[:count].tolist())
    found.sampling = sampling_error(objective, curvatures, clusters=clusters, seed=seed)
    weights, indices = weights_of(objective), pair_indices(objective.batches)
    found.pair_curvatures = PairCurvatures(curvatures.cpu().numpy(), weights, indices)
    if is_top:
        found.cross_fit = cross_fit_hessian(
            operator,
            count,
            top=float(pairs.values[0]),
            sampling=found.sampling,
            clusters=clusters,
            seed=seed,
            state_file=options.state_file,
        )
