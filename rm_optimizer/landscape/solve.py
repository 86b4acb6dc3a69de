"""Eigenvalues of an objective's curvature by the requested method."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.landscape.estimates.by_pair import PairCurvatures
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit
from rm_optimizer.landscape.estimates.density import SpectralDensity
from rm_optimizer.landscape.estimates.sharpness import LocalGeometry
from rm_optimizer.landscape.operators.base import HessianOperator, LossOperator, OutputCurvature, OutputOperator
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum, gauss_newton_exact
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.products import GRAPH_SHARE, ProductName, free_bytes
from rm_optimizer.landscape.operators.support import SupportedOperator
from rm_optimizer.landscape.solvers.krylov import KeptState, KrylovState, OrthonormalBasis
from rm_optimizer.landscape.solvers.lanczos import (
    FEWEST_SPARE,
    Eigenpairs,
    End,
    Progress,
    eigenpairs_so_far,
    lanczos,
    most_products,
    num_wanted,
    rounding,
)
from rm_optimizer.landscape.solvers.overlooked import CHECK_PRODUCTS
from rm_optimizer.landscape.solvers.pyhessian_method import pyhessian_eigenpairs
from rm_optimizer.landscape.solvers.reference import full_spectrum, power_iteration
from rm_optimizer.schema.landscape import SpectrumMethod, TraceMethod

Matrix = Literal["hessian", "gauss_newton", "fisher"]
_log = logging.getLogger("rm_optimizer")


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions:
    """Quantities to compute, and their accuracy.

    Args:
        which: end of the spectrum, for `lanczos`; `both` finds `top_k` values at each end. For a Gauss-Newton or Fisher
            matrix it finds only the largest, since the smallest are 0.
        tolerance: error bound of each eigenvalue, relative to it.
        max_products: most products of the solver; None takes the solver's own limit.
        max_basis: most vectors that `lanczos` holds, at least the number of eigenvalues plus `FEWEST_SPARE`; None sets
            no limit. Twice the number of eigenvalues costs few additional products.
        vector_bytes: most memory for the basis and the eigenvectors of `lanczos`; None takes half of the free memory
            and leaves the other half to kept graphs.
        keep_vectors: False keeps no eigenvectors beyond `num_sampled`. Trace and density are then not deflated, and
            overlooked eigenvalues are not searched for.
        trace_products: products for the trace; 0 estimates none.
        trace_method: one of `TraceMethod`; `deflated` removes the found eigenpairs.
        density_probes: random vectors for the density, which also gives the trace; 0 estimates none.
        density_steps: products for each random vector.
        num_sampled: number of largest eigenvalues that are cross-fitted and get an error over pairs. A Gauss-Newton or
            Fisher matrix computes them from the gradients of single pairs, and its trace gets an interval too.
        sam_rho: radius of the ascent step of `geometry`; 0 does not measure it.
        state_file: file of `lanczos`'s state, from which it continues after a kill; the caller removes it.
        memory_bytes: most memory for the gradients of single pairs.
        product: Hessian-vector product method, or `auto`; see `choose_product`.
        graph_memory_bytes: most memory for kept graphs; None takes half of the free memory.
    """

    which: End = "both"
    tolerance: float = 1e-3
    max_products: int | None = None
    max_basis: int | None = None
    vector_bytes: int | None = None
    keep_vectors: bool = True
    trace_products: int = 0
    trace_method: str = TraceMethod.deflated
    density_probes: int = 0
    density_steps: int = 25
    num_sampled: int = 0
    sam_rho: float = 0.0
    state_file: Path | None = None
    memory_bytes: int = 4_000_000_000
    product: ProductName = "auto"
    graph_memory_bytes: int | None = None


@dataclass
class Solution:
    """Result of a solver, to which `add_estimates` adds.

    Args:
        pairs: eigenpairs.
        is_exhaustive: True if all unlisted eigenvalues are 0.
        is_interrupted: True if the user stopped it.
        searched: end of the spectrum that Lanczos iterated to the tolerance; None otherwise, or by another method.
        trace: trace of the pairs, with its interval over pairs where that was requested, or an estimate.
        sampling: the first eigenvalues with their spread over resampled pairs.
        cross_fit: cross-fitted values of the same eigenvalues.
        not_cross_fitted: ranks that are not cross-fitted, and the reason; empty if all are.
        gram: products of the rows of a Gauss-Newton or Fisher matrix, if the method computed them.
        pair_curvatures: curvature of each pair along the same vectors.
        density: estimated density.
        geometry: gradient and sharpness at the point.
        seconds_before: seconds of earlier processes whose search this one continued.
    """

    pairs: Eigenpairs
    is_exhaustive: bool = False
    is_interrupted: bool = False
    searched: End | None = None
    trace: Estimate | None = None
    sampling: Sequence[Estimate] = ()
    cross_fit: CrossFit | None = None
    not_cross_fitted: str = ""
    gram: GramSpectrum | None = None
    pair_curvatures: PairCurvatures | None = None
    density: SpectralDensity | None = None
    geometry: LocalGeometry | None = None
    seconds_before: float = 0.0


def check_choices(method: str, matrix: str, dtype: torch.dtype, options: SpectrumOptions) -> None:
    """Require a known method and matrix that fit each other, and warn of unused options.

    Raises:
        ConfigError: if they do not.
    """
    choices: tuple[tuple[str, str, Sequence[str]], ...] = (
        ("method", method, tuple(SpectrumMethod)),
        ("matrix", matrix, get_args(Matrix)),
        ("which", options.which, get_args(End)),
    )
    for name, got, known in choices:
        if got not in known:
            raise ConfigError(did_you_mean(name, got, known))
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if not 0 < options.tolerance < 1:
        raise ConfigError(f"tolerance must lie in (0, 1), got {options.tolerance:g}")
    if method == "gauss_newton_exact" and matrix == "hessian":
        raise ConfigError(
            "method=gauss_newton_exact needs matrix=gauss_newton or fisher, got hessian; use method=lanczos"
        )
    if method == "pyhessian" and matrix != "hessian":
        raise ConfigError(f"method=pyhessian needs matrix=hessian, got {matrix}; use method=lanczos")
    _warn_of_unused(method, options)


def _warn_of_unused(method: str, options: SpectrumOptions) -> None:
    if method != "lanczos" and (options.max_basis is not None or not options.keep_vectors):
        _warn("max_basis" if options.keep_vectors else "keep_vectors=False", f"method={method}", "leave it out")
    if options.max_products is not None and method not in ("lanczos", "power_iteration"):
        _warn(f"max_products={options.max_products}", f"method={method}", "leave it out")


def _warn(option: str, by: str, remedy: str) -> None:
    warnings.warn(f"{option} is not used by {by}; {remedy}", stacklevel=4)


def of_known_rank(
    objective: PairObjective, matrix: str, options: SpectrumOptions, top_k: int
) -> tuple[SpectrumOptions, int]:
    """Options and `top_k` adapted to the rank of a Gauss-Newton or Fisher matrix, of which `both` finds the largest.

    The rank is at most the number of pairs, or twice that with a regularizer of the rewards. All other eigenvalues are
    0, so that `top_k` is limited to the rank. If the user named one end, it is kept, zeros included.
    """
    if matrix == "hessian" or options.which != "both":
        return options, top_k
    rank = objective.num_pairs * (2 if objective.loss.center_rewards or objective.loss.reward_l2 else 1)
    return replace(options, which="largest"), top_k if objective.group is not None else max(1, min(top_k, rank))


def known_ends(values: Sequence[float], method: str, which: End) -> tuple[int, int]:
    """Numbers of the first and last of the descending values that are the largest and smallest of all, without a gap.

    Values of largest magnitude count at both ends: a larger eigenvalue than the smallest positive one would be listed.
    """
    count = len(values)
    if method == "full":
        return count, count
    if method == "gauss_newton_exact":
        return count, 0
    if method == "lanczos" and which != "magnitude":
        half = count // 2
        return {"largest": (count, 0), "smallest": (0, count), "both": (count - half, half)}[which]
    num_positive = sum(value > 0 for value in values)
    return num_positive, count - num_positive


def make_operator(objective: PairObjective, matrix: str, options: SpectrumOptions) -> LossOperator:
    """The operator of that name."""
    if matrix == "hessian":
        return HessianOperator(objective, product=options.product, graph_memory_bytes=options.graph_memory_bytes)
    return OutputOperator(objective, cast("OutputCurvature", matrix))


def solve(
    operator: LossOperator,
    method: str,
    top_k: int,
    options: SpectrumOptions,
    *,
    seed: int,
    start: Float[Tensor, "vectors parameters"] | None = None,
    on_iteration: Callable[[Progress], None] | None = None,
) -> Solution:
    """Eigenvalues by the method of that name.

    Raises:
        ConfigError: if more eigenvalues are wanted than the matrix has.
    """
    if method == "full":
        found = full_spectrum(operator)
        return Solution(found, is_exhaustive=True, trace=_exact(float(found.values.sum()), operator.objective))
    if method == "gauss_newton_exact":
        assert isinstance(operator, OutputOperator), "check_choices lets no other pass"
        return _by_gram(operator, top_k, options)
    if method == "power_iteration":
        most = options.max_products or 2000
        return Solution(power_iteration(operator, top_k, tolerance=options.tolerance, max_products=most, seed=seed))
    if method == "pyhessian":
        assert isinstance(operator, HessianOperator), "check_choices lets no other pass"
        return Solution(pyhessian_eigenpairs(operator, top_k, tolerance=options.tolerance, seed=seed))
    return _by_lanczos(operator, top_k, options, seed, start, on_iteration)


def _by_gram(operator: OutputOperator, top_k: int, options: SpectrumOptions) -> Solution:
    gram = gauss_newton_exact(
        operator.objective, curvature=operator.curvature, num_vectors=top_k, memory_bytes=options.memory_bytes
    )
    trace = _exact(gram.trace, operator.objective)
    return Solution(_gram_pairs(gram, operator), is_exhaustive=True, trace=trace, gram=gram)


def _gram_pairs(gram: GramSpectrum, operator: OutputOperator) -> Eigenpairs:
    """Eigenpairs of the small matrix; only the first values have vectors.

    The smaller its value, the more a vector `B^T u / sqrt(lambda)` is moved by rounding; residuals bound that error.
    """
    values = torch.from_numpy(gram.values.copy())
    bounds = torch.full_like(values, rounding(operator.dtype, gram.values))
    ratios = values[:1] / values.clamp(min=torch.finfo(values.dtype).tiny)
    residuals = torch.minimum(bounds * ratios.sqrt(), values[:1])
    return Eigenpairs(values, gram.vectors, residuals, bounds, tuple((values > bounds).tolist()), 0, 0.0)


def _by_lanczos(
    operator: LossOperator,
    top_k: int,
    options: SpectrumOptions,
    seed: int,
    start: Tensor | None,
    on_iteration: Callable[[Progress], None] | None,
) -> Solution:
    matrix = SupportedOperator(operator)
    kept = KeptState(operator, matrix.support, options.state_file, seed)
    state, seconds_before = kept.state, kept.seconds_before
    operator.num_products += state.num_products
    most_vectors = _most_vectors(matrix, top_k, options)
    expected, done_before = _announced(matrix, top_k, options, most_vectors), state.num_products
    if done_before:
        _announce_time(state, expected)

    def after(progress: Progress) -> None:
        kept.after_product()
        if on_iteration is not None:
            on_iteration(progress)
        if state.num_products == 1 > done_before:
            _announce_time(state, expected)

    try:
        pairs = lanczos(
            matrix,
            top_k,
            which=options.which,
            tolerance=options.tolerance,
            max_products=options.max_products,
            max_basis=most_vectors,
            num_vectors=None if options.keep_vectors else options.num_sampled,
            seed=seed,
            start=None if start is None else matrix.support.narrow(start),
            state=state,
            on_iteration=after,
            on_done=operator.release,
        )
    except KeyboardInterrupt:
        if not state.diagonal:
            raise
        kept.save()
        operator.release()
        found = eigenpairs_so_far(matrix, state, top_k, options.which, options.tolerance)
        return Solution(found.widened(matrix.support), is_interrupted=True, seconds_before=seconds_before)
    kept.save()
    state.basis = OrthonormalBasis()  # frees the memory that whole eigenvectors need
    is_done = pairs.values.abs() <= pairs.error_bounds  # below the rounding of products no value converges
    is_done |= torch.tensor(pairs.converged)
    searched = options.which if options.keep_vectors and bool(is_done.all()) else None
    return Solution(pairs.widened(matrix.support), searched=searched, seconds_before=seconds_before)


def _most_vectors(matrix: SupportedOperator, top_k: int, options: SpectrumOptions) -> int | None:
    """Vectors of the basis that the limits allow beside the eigenvectors; None for no limit.

    Without a limit of bytes, vectors may use the free memory that kept graphs leave.

    Raises:
        ConfigError: if they are too few for the search, or more eigenvalues are wanted than the matrix has.
    """
    wanted, size = num_wanted(matrix.dimension, top_k, options.which), _bytes_of_vector(matrix)
    kept = wanted if options.keep_vectors else min(options.num_sampled, wanted)
    least = min(wanted + FEWEST_SPARE, matrix.dimension)
    limit, has = options.vector_bytes, memory_of_vectors(matrix.device, options)
    room = has // size - kept
    if room < least:
        name = "half of the free memory" if limit is None else "the limit"
        remedy = "set landscape.memory_gib to use more" if limit is None else "raise landscape.memory_gib"
        raise ConfigError(
            f"{wanted} eigenvalues over {matrix.dimension:,} parameters need {(least + kept) * size / 2**30:.2g} GiB "
            f"for vectors, and {name} is {has / 2**30:.2g} GiB; {remedy}, or lower landscape.top_k or the parameters "
            "of landscape.params"
        )
    if limit is None and room >= most_products(matrix.dimension, wanted, options.max_products, None):
        return options.max_basis
    most = min(room, options.max_basis or room)
    return None if most >= matrix.dimension else most


def memory_of_vectors(device: torch.device, options: SpectrumOptions) -> int:
    """Bytes that vectors may take: the limit, or the free memory that kept graphs leave."""
    limit = options.vector_bytes
    return int((1 - GRAPH_SHARE) * free_bytes(device)) if limit is None else limit


def _announced(matrix: SupportedOperator, top_k: int, options: SpectrumOptions, most_vectors: int | None) -> int:
    """Log the expected cost of a search, and return the expected products of the search and of what follows.

    Most spectra need 10 products and 2 for each eigenvalue. Cross-fitting needs about as many again, and the search for
    overlooked eigenvalues needs `CHECK_PRODUCTS`.
    """
    wanted = num_wanted(matrix.dimension, top_k, options.which)
    most = most_products(matrix.dimension, wanted, options.max_products, most_vectors)
    products = min(10 + 2 * wanted, matrix.dimension, most)
    vectors = wanted + (products if most_vectors is None else min(products, most_vectors))
    gib = vectors * _bytes_of_vector(matrix) / 2**30
    probes = options.trace_products + options.density_probes * options.density_steps
    check = CHECK_PRODUCTS if options.keep_vectors else 0
    total = products * (2 if options.num_sampled else 1) + check + probes
    _log.info(
        f"{wanted} eigenvalue{'s' * (wanted > 1)} over {matrix.dimension:,} parameters: about {products} products, "
        f"at most {most}, and {gib:.2g} GiB for vectors; with what follows about {total} products"
    )
    return total


def _announce_time(state: KrylovState, expected: int) -> None:
    """Log the expected time of the rest, estimated from all products so far, also those of earlier processes."""
    seconds, left = state.wall_seconds / state.num_products, max(0, expected - state.num_products)
    _log.info(f"a product takes {seconds:.2g} s, {left} more of them about {left * seconds / 60:.2g} min")


def _bytes_of_vector(matrix: SupportedOperator) -> int:
    return matrix.dimension * torch.finfo(matrix.dtype).bits // 8


def _exact(value: float, objective: PairObjective) -> Estimate:
    return Estimate(value, 0.0, objective.num_pairs, value, value, IntervalKind.exact)
