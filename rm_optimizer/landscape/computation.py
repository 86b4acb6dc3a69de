"""Computation of a spectrum: eigenvalues by the requested method, and the estimates that follow them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.estimates.by_pair import PairCurvatures, pair_curvatures, pair_indices, weighted_means
from rm_optimizer.landscape.estimates.cross_fitting import FEWEST_PROMPTS, CrossFit, cross_fit_gram, cross_fit_hessian
from rm_optimizer.landscape.estimates.density import SpectralDensity, spectral_density
from rm_optimizer.landscape.estimates.quantities import LocalGeometry, Quantity, effective_rank, local_geometry
from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, HessianOperator, LossOperator, OutputOperator
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum, gauss_newton_exact
from rm_optimizer.landscape.operators.products import GRAPH_SHARE, KeptGraph, free_bytes
from rm_optimizer.landscape.operators.support import SupportedOperator
from rm_optimizer.landscape.solvers.krylov import KeptState, OrthonormalBasis
from rm_optimizer.landscape.solvers.lanczos import (
    FEWEST_SPARE,
    Eigenpairs,
    End,
    Progress,
    Ritz,
    lanczos,
    most_products,
    num_of_ends,
    num_wanted,
    rounding,
)
from rm_optimizer.landscape.solvers.overlooked import CHECK_PRODUCTS, with_overlooked
from rm_optimizer.landscape.solvers.reference import full_spectrum, power_iteration, pyhessian_eigenpairs
from rm_optimizer.schema.landscape import SpectrumOptions

_log = logging.getLogger("rm_optimizer")
ESTIMATES = (
    *("method", "is_exhaustive", "trace", "density", "cross_fit", "not_cross_fitted"),
    *("pair_curvatures", "geometry", "gauss_newton_rank"),
)
"""Attributes of a computation that its spectrum has too."""


@dataclass(eq=False, kw_only=True)
class SpectrumComputation:
    """Eigenvalues of one matrix and the estimates that follow them, added one after the other by `run`.

    Args:
        operator: the matrix.
        method: method of the eigenvalues.
        top_k: number of eigenvalues, at each end if `options.which` is `both`. Of a Gauss-Newton or Fisher matrix,
            `both` finds the largest only, at most its rank: the number of pairs, or twice that with a regularizer of
            the rewards. Its other eigenvalues are 0. If the user named one end, it is kept, zeros included.
        options: requested quantities, and their accuracy.
        with_density: True to estimate the density, which also gives the trace.
        seed: seed of the starting vector and of the resampling; random vectors of the estimates take the next ones.
        clusters: number of each pair's prompt, in the order of the batches.
        start: starting vectors of `lanczos`; None draws one.
        state_file: file of `lanczos`'s state, from which it continues after a kill.
        on_iteration: function called after each product of `lanczos`.
        pairs: eigenpairs found so far.
        searched: end of the spectrum that `lanczos` iterated to the tolerance; None otherwise, or by another method.
        gram: products of the rows of a Gauss-Newton or Fisher matrix, if the method computed them.
        seconds_before: seconds of earlier processes whose search this one continued.

    The other attributes are described at `HessianSpectrum`.
    """

    operator: LossOperator
    method: str
    top_k: int
    options: SpectrumOptions
    with_density: bool = False
    seed: int
    clusters: Sequence[int]
    start: Tensor | None = None
    state_file: Path | None = None
    on_iteration: Callable[[Progress], None] | None = None
    pairs: Eigenpairs = field(init=False)
    searched: End | None = None
    gram: GramSpectrum | None = None
    seconds_before: float = 0.0
    is_exhaustive: bool = False
    is_interrupted: bool = False
    trace: Estimate | None = None
    density: SpectralDensity | None = None
    sampling: Sequence[Estimate] = ()
    cross_fit: CrossFit | None = None
    not_cross_fitted: str = "the analysis was interrupted before it"
    pair_curvatures: PairCurvatures | None = None
    geometry: LocalGeometry | None = None
    gauss_newton_rank: Quantity | None = None

    def __post_init__(self) -> None:
        asked = self.top_k if self.options.num_sampled is None else self.options.num_sampled
        self.num_sampled = asked if self.method == "full" else min(asked, self.top_k)
        self.which = cast("End", str(self.options.which))
        objective = self.operator.objective
        if isinstance(self.operator, OutputOperator) and self.which == "both":
            self.which = "largest"
            rank = objective.num_pairs * (1 if objective.loss.is_of_margins else 2)
            self.top_k = self.top_k if objective.group is not None else max(1, min(self.top_k, rank))

    def run(self, on_product: Callable[[int], None]) -> None:
        """Compute eigenvalues, then estimates; after Ctrl-C the finished ones stay, labeled as interrupted.

        Args:
            on_product: function of the number of products, called by other methods than `lanczos` and by the estimates.

        Raises:
            ConfigError: if more eigenvalues are wanted than the matrix has.
            KeyboardInterrupt: if the user stopped it before there were eigenvalues.
        """
        operator, tolerance = self.operator, self.options.tolerance
        if self.method != "lanczos":
            operator.on_product = on_product
        if self.method == "lanczos":
            self.pairs = self._by_lanczos()
        elif self.method == "power_iteration":
            most = self.options.max_products or 2000
            self.pairs = power_iteration(operator, self.top_k, tolerance=tolerance, max_products=most, seed=self.seed)
        elif self.method == "pyhessian":
            assert isinstance(operator, HessianOperator), "_check_choices lets no other matrix pass"
            self.pairs = pyhessian_eigenpairs(operator, self.top_k, tolerance=tolerance, seed=self.seed)
        elif self.method == "full":
            self.pairs, self.is_exhaustive = full_spectrum(operator), True
            self.trace = _exact(float(self.pairs.values.sum()), operator)
        else:
            assert isinstance(operator, OutputOperator), "_check_choices lets no other matrix pass"
            self.gram = self._gram(operator, num_vectors=self.top_k)
            self.pairs, self.is_exhaustive = gram_pairs(self.gram, operator), True
            self.trace = _exact(self.gram.trace, operator)
        operator.on_product = on_product
        try:
            if not self.is_interrupted:
                self._estimate()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def _by_lanczos(self) -> Eigenpairs:
        matrix, options = SupportedOperator(self.operator), self.options
        kept = KeptState(self.operator, matrix.support, self.state_file, self.seed)
        state, self.seconds_before = kept.state, kept.seconds_before
        self.operator.num_products += state.num_products
        (max_basis, expected), first = self._planned(matrix), max(1, state.num_products)

        def after(progress: Progress) -> None:
            kept.after_product()
            if state.num_products == first:  # the mean of all products so far, of earlier processes too
                seconds, left = state.wall_seconds / first, max(0, expected - first)
                _log.info(f"a product takes {seconds:.2g} s, {left} more of them about {left * seconds / 60:.2g} min")
            if self.on_iteration is not None:
                self.on_iteration(progress)

        try:
            pairs = lanczos(
                matrix,
                self.top_k,
                which=self.which,
                tolerance=options.tolerance,
                max_products=options.max_products,
                max_basis=max_basis,
                num_vectors=None if options.keep_vectors else self.num_sampled,
                seed=self.seed,
                start=None if self.start is None else matrix.support.narrow(self.start),
                state=state,
                on_iteration=after,
                on_done=self.operator.release,
            )
        except KeyboardInterrupt:
            if not state.diagonal:
                raise
            self.is_interrupted = True
        kept.save()
        self.operator.release()
        ritz = Ritz(matrix, state, self.top_k, self.which, options.tolerance)
        if self.is_interrupted:
            pairs = ritz.eigenpairs()
        state.basis = OrthonormalBasis()  # frees the memory that whole eigenvectors need
        # below the rounding of products no value converges
        is_done = (pairs.values.abs() <= pairs.error_bounds) & torch.from_numpy(ritz.within[ritz.selected])
        is_done |= torch.tensor(pairs.converged)
        if options.keep_vectors and not self.is_interrupted and bool(is_done.all()):
            self.searched = self.which
        return pairs.widened(matrix.support)

    def _planned(self, matrix: SupportedOperator) -> tuple[int | None, int]:
        """Most vectors of the basis, next to the eigenvectors, and expected products; both are logged.

        Most spectra need 10 products and 2 for each eigenvalue. Cross-fitting needs about as many again, and the search
        for overlooked eigenvalues needs `CHECK_PRODUCTS`.

        Returns:
            Most vectors of the basis, None for no limit, and products of the search and of what follows.

        Raises:
            ConfigError: if the vectors are too few for the search, or more eigenvalues are wanted than the matrix has.
        """
        options, dimension = self.options, matrix.dimension
        size = dimension * matrix.dtype.itemsize
        wanted = num_wanted(dimension, self.top_k, self.which)
        kept = wanted if options.keep_vectors else min(self.num_sampled, wanted)
        least, has = min(wanted + FEWEST_SPARE, dimension), self._memory_of_vectors()
        room = has // size - kept
        if room < least:
            name, remedy = (
                ("half of the free memory", "set landscape.memory_gib to use more")
                if options.memory_gib is None
                else ("the limit", "raise landscape.memory_gib")
            )
            raise ConfigError(
                f"{wanted} eigenvalues over {dimension:,} parameters need {(least + kept) * size / 2**30:.2g} "
                f"GiB for vectors, and {name} is {has / 2**30:.2g} GiB; {remedy}, or lower landscape.top_k or the "
                "parameters of landscape.params"
            )
        max_basis = options.max_basis
        if options.memory_gib is not None or room < most_products(dimension, wanted, options.max_products, None):
            limit = min(room, max_basis or room)
            max_basis = None if limit >= dimension else limit
        most = most_products(dimension, wanted, options.max_products, max_basis)
        products = min(10 + 2 * wanted, dimension, most)
        vectors = wanted + (products if max_basis is None else min(products, max_basis))
        probes = options.num_probes * (options.probe_steps if self.with_density else 1)
        check = CHECK_PRODUCTS if options.keep_vectors else 0
        total = products * (2 if self.num_sampled else 1) + check + probes
        _log.info(
            f"{wanted} eigenvalue{'s' * (wanted > 1)} over {dimension:,} parameters: about {products} products, "
            f"at most {most}, and {vectors * size / 2**30:.2g} GiB for vectors; with what follows about {total} "
            "products"
        )
        return max_basis, total

    def _memory_of_vectors(self) -> int:
        """Bytes that vectors may take: the limit, or the free memory that kept graphs leave."""
        limit = self.options.memory_bytes
        return int((1 - GRAPH_SHARE) * free_bytes(self.operator.device)) if limit is None else limit

    def _estimate(self) -> None:
        """Search for overlooked eigenvalues, and add sampling errors, density, trace and rank, in this order."""
        operator, options = self.operator, self.options
        if options.sam_rho and isinstance(operator, HessianOperator):
            self.geometry = local_geometry(operator.objective, operator, rho=options.sam_rho)
        if self.searched:
            seed = self.seed + 2
            self.pairs = with_overlooked(operator, self.pairs, self.searched, tolerance=options.tolerance, seed=seed)
        self._add_sampling()
        removable = (
            self.pairs if self.pairs.is_orthonormal and len(self.pairs.vectors) == len(self.pairs.values) else None
        )
        if self.with_density:
            at_once = 1  # random vectors whose bases share memory; products with kept graphs have nothing to share
            if not (isinstance(operator, HessianOperator) and operator.product == KeptGraph.name):
                room = self._memory_of_vectors() - self.pairs.vectors.nbytes
                basis = (options.probe_steps + 1) * operator.dimension * operator.dtype.itemsize
                at_once = max(1, min(VECTORS_AT_ONCE, room // basis))
            self.density = spectral_density(
                operator,
                num_probes=options.num_probes,
                num_steps=options.probe_steps,
                seed=self.seed + 1,
                found=removable,
                at_once=at_once,
            )
            self.trace = self.trace or self.density.moment(1)
        if self.trace is None and options.num_probes:
            method, count = options.trace_method, options.num_probes
            self.trace = estimate_trace(operator, method, count, seed=self.seed + 1, found=removable)
        if options.effective_rank:
            known = self.gram if isinstance(operator, OutputOperator) and operator.curvature == "gauss_newton" else None
            self.gauss_newton_rank = effective_rank(operator.objective, known, options.memory_bytes)

    def _add_sampling(self) -> None:
        """Add the errors of the first eigenvalues over pairs, and cross-fitted values of the largest ones."""
        pairs, objective = self.pairs, self.operator.objective
        num_top, num_bottom = known_ends(pairs.values.tolist(), self.method, self.which)
        is_zero = (pairs.values.abs() <= pairs.error_bounds).tolist()
        num_nonzero = is_zero.index(True) if True in is_zero else len(is_zero)
        count = min(self.num_sampled, len(pairs.vectors), num_nonzero, *([num_top] if num_top else []))
        if count and isinstance(self.operator, OutputOperator):
            gram = self.gram = self.gram or self._gram(self.operator)
            count, everything = min(count, len(gram.values)), np.arange(gram.num_pairs)
            *self.sampling, self.trace = gram.bootstrap(count, clusters=self.clusters, seed=self.seed)
            self.cross_fit = cross_fit_gram(gram, count, clusters=self.clusters, seed=self.seed)
            along, weights = gram.curvatures(everything, everything, count), gram.pair_weights
            self.pair_curvatures = PairCurvatures(along, weights, pair_indices(objective.batches), gram)
        elif count and isinstance(self.operator, HessianOperator):
            curvatures = pair_curvatures(objective, pairs.vectors[:count], pairs.values[:count].tolist())
            along, weights = curvatures.cpu().numpy(), objective.pair_weights
            self.sampling = weighted_means(along, weights, clusters=self.clusters, seed=self.seed)
            self.pair_curvatures = PairCurvatures(along, weights, pair_indices(objective.batches))
            if num_top:
                self.cross_fit = cross_fit_hessian(
                    self.operator,
                    self.sampling,
                    top=float(pairs.values[0]),
                    clusters=self.clusters,
                    seed=self.seed,
                    state_file=self.state_file,
                )
        self.not_cross_fitted = self._without_cross_fit(num_top, num_nonzero)
        if num_top < len(pairs.values) and num_bottom > 0:
            self.not_cross_fitted = "; ".join(filter(None, [self.not_cross_fitted, "smallest: only the largest are"]))

    def _without_cross_fit(self, num_top: int, num_nonzero: int) -> str:
        """Ranks of the largest without a cross-fitted value, and the reason.

        Args:
            num_top: largest eigenvalues that are listed.
            num_nonzero: number of the first eigenvalues that lie further from 0 than their error bounds.
        """
        found = 0 if self.cross_fit is None else len(self.cross_fit.values)
        if found >= num_top:
            return ""
        ranks, prompts = f"{found + 1} to " * (found + 1 < num_top), len(set(self.clusters))
        reason = f"halves of the pairs have {found} eigenvalues above 0"
        if prompts < FEWEST_PROMPTS and self.num_sampled:
            reason = f"{prompts} prompts, and halves of halves need at least {FEWEST_PROMPTS}"
        elif found == self.num_sampled:
            reason = f"num_sampled={self.num_sampled}"
        elif found == num_nonzero:
            reason = "0 within the error bound"
        return f"largest {ranks}{num_top}: {reason}"

    def _gram(self, operator: OutputOperator, num_vectors: int = 0) -> GramSpectrum:
        objective, curvature, limit = operator.objective, operator.curvature, self.options.memory_bytes
        return gauss_newton_exact(objective, curvature=curvature, num_vectors=num_vectors, memory_bytes=limit)


def gram_pairs(gram: GramSpectrum, operator: OutputOperator) -> Eigenpairs:
    """Eigenpairs of a matrix from the products of its rows; only the first values have vectors.

    The smaller its value, the more a vector `B^T u / sqrt(lambda)` is moved by rounding; residuals bound that error.
    """
    values = torch.from_numpy(gram.values.copy())
    bounds = torch.full_like(values, rounding(operator.dtype, gram.values))
    ratios = values[:1] / values.clamp(min=torch.finfo(values.dtype).tiny)
    residuals = torch.minimum(bounds * ratios.sqrt(), values[:1])
    return Eigenpairs(values, gram.vectors, residuals, bounds, tuple((values > bounds).tolist()), 0, 0.0)


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
        return num_of_ends(count, which)
    num_positive = sum(value > 0 for value in values)
    return num_positive, count - num_positive


def _exact(value: float, operator: LossOperator) -> Estimate:
    return Estimate(value, 0.0, operator.objective.num_pairs, value, value, IntervalKind.exact)
