"""Public interface to the spectrum of a reward model's loss, and the estimates that follow the eigenvalues."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import FEWEST, Prompts
from rm_optimizer.landscape.estimates.by_pair import PairCurvatures, pair_curvatures, pair_indices, sampling_error
from rm_optimizer.landscape.estimates.cross_fitting import (
    FEW_PROMPTS,
    cross_fit_gram,
    cross_fit_hessian,
    not_cross_fitted,
    num_prompts,
    weights_of,
)
from rm_optimizer.landscape.estimates.density import spectral_density
from rm_optimizer.landscape.estimates.sharpness import local_geometry
from rm_optimizer.landscape.estimates.trace import estimate_trace
from rm_optimizer.landscape.measured_loss import PairSource, clusters_of, fixed_batches
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, HessianOperator, LossOperator, OutputOperator
from rm_optimizer.landscape.operators.gauss_newton import gauss_newton_exact
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.landscape.operators.products import KeptGraph
from rm_optimizer.landscape.operators.single_pairs import pairs_digest
from rm_optimizer.landscape.solve import (
    Matrix,
    Solution,
    SpectrumOptions,
    check_choices,
    known_ends,
    make_operator,
    memory_of_vectors,
    of_known_rank,
    solve,
)
from rm_optimizer.landscape.solvers.krylov import remove_states
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, End, Progress
from rm_optimizer.landscape.solvers.overlooked import with_overlooked
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.schema import LossConfig

_log = logging.getLogger("rm_optimizer")


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
        _Estimates(operator, found, method, options, seed, clusters).add()
    except KeyboardInterrupt:
        found.is_interrupted = True


@dataclass
class _Estimates:
    """Requested estimates of one matrix, added to its eigenvalues; the arguments are those of `add_estimates`."""

    operator: LossOperator
    found: Solution
    method: str
    options: SpectrumOptions
    seed: int
    clusters: Sequence[int] | None

    def add(self) -> None:
        """Search for overlooked eigenvalues, and add sampling errors, density and trace, in this order."""
        is_hessian = isinstance(self.operator, HessianOperator)
        if self.options.sam_rho and is_hessian:
            self.found.geometry = local_geometry(self.operator.objective, self.operator, rho=self.options.sam_rho)
        if self.found.searched:
            self.found.pairs = with_overlooked(
                self.operator,
                self.found.pairs,
                self.found.searched,
                tolerance=self.options.tolerance,
                seed=self.seed + 2,
            )
        self._add_sampling()
        pairs = self.found.pairs
        removable = pairs if pairs.is_orthonormal and len(pairs.vectors) == len(pairs.values) else None
        if self.options.density_probes:
            self.found.density = spectral_density(
                self.operator,
                num_probes=self.options.density_probes,
                num_steps=self.options.density_steps,
                seed=self.seed + 1,
                found=removable,
                at_once=self._probes_at_once(),
            )
            self.found.trace = self.found.trace or self.found.density.moment(1)
        if self.found.trace is None and self.options.trace_products:
            self.found.trace = estimate_trace(
                self.operator,
                self.options.trace_method,
                self.options.trace_products,
                seed=self.seed + 1,
                found=removable,
                is_semidefinite=not is_hessian,
            )

    def _probes_at_once(self) -> int:
        """Number of random vectors whose Lanczos bases share memory; 1 if products have nothing to share."""
        if isinstance(self.operator, HessianOperator) and self.operator.product == KeptGraph.name:
            return 1
        basis = (self.options.density_steps + 1) * self.operator.dimension * torch.finfo(self.operator.dtype).bits // 8
        room = memory_of_vectors(self.operator.device, self.options) - self.found.pairs.vectors.nbytes
        return max(1, min(VECTORS_AT_ONCE, room // basis))

    def _add_sampling(self) -> None:
        """Add the errors of the first eigenvalues over pairs, and cross-fitted values of the largest ones."""
        num_values = len(self.found.pairs.values)
        num_top, num_bottom = known_ends(self.found.pairs.values.tolist(), self.method, self.options.which)
        num_nonzero = _num_nonzero(self.found.pairs)
        listed = min(len(self.found.pairs.vectors), num_nonzero)
        sampled = min(self.options.num_sampled, listed, num_top) if num_top else min(self.options.num_sampled, listed)
        if sampled and isinstance(self.operator, OutputOperator):
            self._sample_gram(self.operator, sampled)
        elif sampled and isinstance(self.operator, HessianOperator):
            self._sample_hessian(self.operator, sampled, is_top=num_top > 0)
        self.found.not_cross_fitted = not_cross_fitted(
            num_top,
            self.options.num_sampled,
            num_nonzero,
            num_prompts(self.operator.objective.num_pairs, self.clusters),
            self.found.cross_fit,
            lists_smallest=num_top < num_values and num_bottom > 0,
        )

    def _sample_gram(self, operator: OutputOperator, count: int) -> None:
        """Add errors over pairs from the gradients of single pairs, whatever the method of the eigenvalues."""
        gram = self.found.gram or gauss_newton_exact(
            operator.objective, curvature=operator.curvature, memory_bytes=self.options.memory_bytes
        )
        count = min(count, len(gram.values))
        *self.found.sampling, self.found.trace = gram.bootstrap(count, clusters=self.clusters, seed=self.seed)
        self.found.cross_fit = cross_fit_gram(gram, count, clusters=self.clusters, seed=self.seed)
        everything = np.arange(gram.num_pairs)
        along, indices = gram.curvatures(everything, everything, count), pair_indices(operator.objective.batches)
        self.found.pair_curvatures = PairCurvatures(along, gram.pair_weights, indices, gram)

    def _sample_hessian(self, operator: HessianOperator, count: int, *, is_top: bool) -> None:
        """Add errors over pairs from second derivatives of single pairs along the vectors."""
        objective, pairs = operator.objective, self.found.pairs
        curvatures = pair_curvatures(objective, pairs.vectors[:count], pairs.values[:count].tolist())
        self.found.sampling = sampling_error(objective, curvatures, clusters=self.clusters, seed=self.seed)
        weights, indices = weights_of(objective), pair_indices(objective.batches)
        self.found.pair_curvatures = PairCurvatures(curvatures.cpu().numpy(), weights, indices)
        if is_top:
            self.found.cross_fit = cross_fit_hessian(
                operator,
                count,
                top=float(pairs.values[0]),
                sampling=self.found.sampling,
                clusters=self.clusters,
                seed=self.seed,
                state_file=self.options.state_file,
            )


def _num_nonzero(pairs: Eigenpairs) -> int:
    """Number of the first eigenvalues that lie further from 0 than their error bounds."""
    is_zero = (pairs.values.abs() <= pairs.error_bounds).tolist()
    return is_zero.index(True) if True in is_zero else len(is_zero)


@dataclass(eq=False, repr=False)
class HessianAnalyzer:
    """Analyzer of the curvature of a reward model's loss, which leaves the model unchanged.

    Args:
        model: the reward model.
        loss: training loss; None is the plain Bradley-Terry loss.
        params: parameters to derive by: `trainable`, `head`, `lora`, or patterns of parameter names.
        token_budget: most tokens of a micro-batch, padding included; it limits memory and does not change results.
        dtype: type to compute in; if the weights have another type, a copy is measured.
        seed: seed of all random vectors and of the draw of pairs.
        group: processes that hold shares of the pairs; None where this one has all.
    """

    model: BradleyTerryRM
    _: KW_ONLY
    loss: LossConfig | None = None
    params: str | Sequence[str] = TRAINABLE
    token_budget: int = 8192
    dtype: torch.dtype = torch.float32
    seed: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        require_bradley_terry(self.model)

    def compute_spectrum(
        self,
        pairs: PairSource,
        method: str = "lanczos",
        *,
        top_k: int = 20,
        matrix: Matrix | None = None,
        num_pairs: int | None = None,
        options: SpectrumOptions | None = None,
        start: HessianSpectrum | None = None,
        prompts: Prompts | None = None,
        on_iteration: Callable[[Progress], None] | None = None,
        on_product: Callable[[int], None] = lambda num_products: None,
    ) -> HessianSpectrum:
        """Compute eigenvalues and, on request, trace, density and sampling error.

        Ctrl-C during `lanczos` or the estimates after it returns the values found, with the `status` `interrupted`.

        Args:
            pairs: pairs, or a loader of batches of pairs.
            method: `lanczos`, `power_iteration`, `full` (few parameters), `gauss_newton_exact` (from single pairs) or
                `pyhessian` (an extra, to compare with).
            top_k: number of eigenvalues to find, at each end if `options.which` is `both`.
            matrix: `hessian`, `gauss_newton` or `fisher`; None takes the method's own matrix, otherwise the Hessian.
            num_pairs: pairs to draw; None takes all.
            options: further quantities to compute, and their accuracy.
            start: an earlier spectrum to start `lanczos` from, such as that of an earlier step of a run.
            prompts: number of each pair's prompt by its `pair_index`, needed for a loader only. Errors over pairs count
                pairs of one prompt as one.
            on_iteration: function called after each product of `lanczos`.
            on_product: function of the number of products, called by other methods and by the estimates that follow.

        Raises:
            ConfigError: if an option is unknown or does not fit, the model cannot be differentiated twice, or `start`
                has no vectors of these parameters.
            DataError: if there are fewer than two pairs.
            TrainingDiverged: if the loss is not finite.
        """
        kind = matrix or ("gauss_newton" if method == "gauss_newton_exact" else "hessian")
        options, began = options or SpectrumOptions(), time.perf_counter()
        check_choices(method, kind, self.dtype, options)
        with self._measuring(pairs, num_pairs) as (objective, known_prompts):
            clusters = clusters_of(objective.batches, prompts or known_prompts)
            _warn_of_few(objective.num_pairs, clusters, options)
            options, top_k = of_known_rank(objective, kind, options, top_k)
            operator = make_operator(objective, kind, options)
            if method != "lanczos":
                operator.on_product = on_product
            vectors, seed = None if start is None else _start(start, operator, method), self.seed
            found = solve(operator, method, top_k, options, seed=seed, start=vectors, on_iteration=on_iteration)
            operator.on_product = on_product
            add_estimates(operator, found, method, options, seed=seed, clusters=clusters)
            seconds = found.seconds_before + time.perf_counter() - began
            spectrum = self._spectrum(operator, kind, method, options.which, found, seconds)
        if options.state_file is not None and not found.is_interrupted:
            remove_states(options.state_file)
        return spectrum

    @contextmanager
    def _measuring(self, pairs: PairSource, num_pairs: int | None) -> Iterator[tuple[PairObjective, Prompts | None]]:
        fewest = FEWEST if self.group is None else 0
        batches, prompts = fixed_batches(
            self.model, pairs, token_budget=self.token_budget, num_pairs=num_pairs, seed=self.seed, fewest=fewest
        )
        with measuring(
            self.model, batches, self.loss or LossConfig(), params=self.params, dtype=self.dtype, group=self.group
        ) as objective:
            yield objective, prompts

    def _spectrum(
        self, operator: LossOperator, matrix: str, method: str, which: End, found: Solution, wall_seconds: float
    ) -> HessianSpectrum:
        objective, pairs = operator.objective, found.pairs
        num_top, num_bottom = known_ends(pairs.values.tolist(), method, which)
        choice = operator.choice if isinstance(operator, HessianOperator) else None
        name = choice.product.name if choice else "pair_gradients" if method == "gauss_newton_exact" else "reverse"
        return HessianSpectrum(
            eigenvalues=tuple(pairs.values.tolist()),
            residuals=tuple(pairs.residuals.tolist()),
            error_bounds=tuple(pairs.error_bounds.tolist()),
            converged=pairs.converged,
            num_top=num_top,
            num_bottom=num_bottom,
            num_overlooked=pairs.num_overlooked,
            is_exhaustive=found.is_exhaustive,
            trace=found.trace,
            density=found.density,
            sampling=tuple(found.sampling),
            cross_fit=found.cross_fit,
            not_cross_fitted=found.not_cross_fitted,
            pair_curvatures=found.pair_curvatures,
            geometry=found.geometry,
            matrix=matrix,
            method=method,
            params=self.params if isinstance(self.params, str) else ", ".join(self.params),
            num_parameters=operator.dimension,
            num_pairs=objective.num_pairs,
            loss=objective.value(),
            num_products=operator.num_products,
            product=name,
            product_reason=choice.reason if choice else "the only way",
            gradients_per_product=choice.gradients_per_product.get(choice.product.name) if choice else None,
            wall_seconds=wall_seconds,
            dtype=str(objective.dtype).removeprefix("torch."),
            seed=self.seed,
            loss_options=json.dumps(vars(objective.loss), sort_keys=True),
            pairs_digest=pairs_digest(objective.batches) if self.group is None else "",
            weights_digest=weights_digest(self.model),
            status=SpectrumStatus.interrupted if found.is_interrupted else SpectrumStatus.complete,
            eigenvectors=pairs.vectors,
        )


def _warn_of_few(num_pairs: int, clusters: Sequence[int] | None, options: SpectrumOptions) -> None:
    """Warn if intervals over pairs are requested and there are too few prompts for them."""
    count = num_prompts(num_pairs, clusters)
    if options.num_sampled and count < FEW_PROMPTS:
        _log.warning(
            f"eigenvalues of {count} prompts are far too large, and their intervals over pairs too narrow; take "
            f"at least {FEW_PROMPTS}, 256 or more are useful"
        )


def _start(spectrum: HessianSpectrum, operator: LossOperator, method: str) -> Tensor:
    """Starting vector: the sum of an earlier spectrum's eigenvectors."""
    if method != "lanczos":
        raise ConfigError(f"start needs method=lanczos, got {method}; leave it out")
    vectors = spectrum.eigenvectors
    if vectors is None or not len(vectors):
        raise ConfigError("start must have eigenvectors, which JSON does not hold; give a computed spectrum, or none")
    if vectors.shape[1] != operator.dimension:
        raise ConfigError(
            f"start is over {vectors.shape[1]} parameters, and these are {operator.dimension}; "
            "give one of the same params"
        )
    return vectors.sum(dim=0, keepdim=True).to(operator.device, operator.dtype)
