"""Public interface to the spectrum of a reward model's loss."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import FEWEST, Prompts
from rm_optimizer.landscape.estimates.cross_fitting import FEW_PROMPTS, num_prompts
from rm_optimizer.landscape.operators.base import HessianOperator, LossOperator
from rm_optimizer.landscape.operators.identity import pairs_digest
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.landscape.pairs_input import PairSource, clusters_of, fixed_batches
from rm_optimizer.landscape.solve import (
    Matrix,
    Solution,
    SpectrumOptions,
    check_choices,
    known_ends,
    make_operator,
    of_known_rank,
    solve,
)
from rm_optimizer.landscape.solvers.kept import remove_states
from rm_optimizer.landscape.solvers.lanczos import End, Progress
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.spectrum_estimates import add_estimates
from rm_optimizer.schema import LossConfig

_log = logging.getLogger("rm_optimizer")


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
