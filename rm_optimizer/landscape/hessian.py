"""The front door: the spectrum of a reward model's loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rm_optimizer.core.batching import AnyPairBatch
from rm_optimizer.core.estimate import Estimate
from rm_optimizer.core.reward_model import BradleyTerryRM
from rm_optimizer.landscape.density import SpectralDensity, spectral_density
from rm_optimizer.landscape.lanczos import Progress
from rm_optimizer.landscape.objective import PairObjective, measuring
from rm_optimizer.landscape.operators import HessianOperator
from rm_optimizer.landscape.pairs_input import FEWEST, PairSource, fixed_batches
from rm_optimizer.landscape.parameters import TRAINABLE, parameter_blocks
from rm_optimizer.landscape.sampling import sampling_error
from rm_optimizer.landscape.sharpness import LocalGeometry, local_geometry
from rm_optimizer.landscape.solve import (
    LossOperator,
    Matrix,
    Method,
    Solution,
    SpectrumOptions,
    check_choices,
    known_ends,
    make_operator,
    solve,
)
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.trace import estimate_trace
from rm_optimizer.schema import LossConfig


class HessianAnalyzer:
    """Computes spectra of the curvature of a reward model's loss, and leaves the model as it was.

    Args:
        model: the reward model.
        loss: what it was trained on; None is the plain Bradley-Terry loss.
        params: `trainable`, `head`, `lora`, or patterns of parameter names.
        token_budget: tokens with padding of a micro-batch; bounds memory and changes nothing else.
        dtype: type to compute in; another than the weights' measures a copy.
        seed: of all random vectors and of the draw of pairs.
        group: processes that hold shares of the pairs; None where this one has all.
    """

    def __init__(
        self,
        model: BradleyTerryRM,
        *,
        loss: LossConfig | None = None,
        params: str | Sequence[str] = TRAINABLE,
        token_budget: int = 8192,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.loss = loss if loss is not None else LossConfig()
        self.params = params
        self.token_budget = token_budget
        self.dtype = dtype
        self.seed = seed
        self.group = group

    def compute_spectrum(
        self,
        pairs: PairSource,
        method: Method = "lanczos",
        *,
        top_k: int = 20,
        matrix: Matrix | None = None,
        num_pairs: int | None = None,
        options: SpectrumOptions | None = None,
        start: HessianSpectrum | None = None,
        on_iteration: Callable[[Progress], None] | None = None,
        on_product: Callable[[int], None] = lambda num_products: None,
    ) -> HessianSpectrum:
        """Eigenvalues, and where asked for trace, density and sampling error.

        Interrupting (Ctrl-C) `lanczos` gives what was found until then, and the spectrum's `status` says so.

        Args:
            pairs: pairs, or a loader of batches of pairs.
            method: `lanczos`, `power_iteration`, `full` (few parameters), `gauss_newton_exact` (from single pairs) or
                `pyhessian` (an extra, to compare with).
            top_k: eigenvalues to find, at each end where `options.which` is `both`.
            matrix: `hessian`, `gauss_newton` or `fisher`; None is the Hessian, or what the method is of.
            num_pairs: pairs to draw; None takes all.
            options: what else to find, and how exactly.
            start: an earlier spectrum to start `lanczos` from, such as that of an earlier step of a run.
            on_iteration: told after each product of `lanczos`.
            on_product: told the products spent so far by other methods, and by what follows the eigenvalues.

        Raises:
            ConfigError: if an option is unknown or does not fit, or the model cannot be differentiated twice.
            DataError: if there are fewer than two pairs.
            TrainingDiverged: if the loss is not finite.
        """
        kind = matrix or ("gauss_newton" if method == "gauss_newton_exact" else "hessian")
        check_choices(method, kind)
        options, began = options or SpectrumOptions(), time.perf_counter()
        with self._measuring(pairs, num_pairs) as objective:
            operator = make_operator(objective, kind, options)
            if method != "lanczos":
                operator.on_product = on_product
            vectors = None if start is None else start.eigenvectors
            found = solve(operator, method, top_k, options, seed=self.seed, start=vectors, on_iteration=on_iteration)
            operator.on_product = on_product
            extra = _Extra() if found.is_interrupted else _extras(operator, found, options, self.seed)
            return self._spectrum(operator, kind, method, options, found, extra, time.perf_counter() - began)

    def compute_block_spectra(
        self,
        pairs: PairSource,
        method: Method = "lanczos",
        *,
        top_k: int = 5,
        num_pairs: int | None = None,
        options: SpectrumOptions | None = None,
    ) -> dict[str, HessianSpectrum]:
        """The spectrum of each diagonal block: embeddings, each layer, and what follows the layers.

        Args:
            pairs: pairs, or a loader of batches of pairs, which is read once.
            method: as for `compute_spectrum`.
            top_k: eigenvalues of each block, at most as many as it has.
            num_pairs: pairs to draw; None takes all.
            options: as for `compute_spectrum`.
        """
        batches = self._batches(pairs, num_pairs)
        ends = 2 if (options or SpectrumOptions()).which == "both" and method == "lanczos" else 1
        spectra: dict[str, HessianSpectrum] = {}
        for name, subset in parameter_blocks(self.model).items():
            block = HessianAnalyzer(
                self.model,
                loss=self.loss,
                params=subset.names,
                token_budget=self.token_budget,
                dtype=self.dtype,
                seed=self.seed,
                group=self.group,
            )
            most = max(1, min(top_k, subset.num_parameters // ends))
            spectra[name] = block.compute_spectrum(batches, method, top_k=most, options=options)
        return spectra

    def compute_geometry(self, pairs: PairSource, *, rho: float = 0.05, num_pairs: int | None = None) -> LocalGeometry:
        """Loss, gradient norm, SAM sharpness and how the gradient lies to the curvature.

        Args:
            pairs: pairs, or a loader of batches of pairs.
            rho: radius of SAM's ascent step.
            num_pairs: pairs to draw; None takes all.
        """
        with self._measuring(pairs, num_pairs) as objective:
            return local_geometry(objective, HessianOperator(objective, product="reverse"), rho=rho)

    def _batches(self, pairs: PairSource, num_pairs: int | None) -> list[AnyPairBatch]:
        return fixed_batches(
            self.model,
            pairs,
            token_budget=self.token_budget,
            num_pairs=num_pairs,
            seed=self.seed,
            fewest=FEWEST if self.group is None else 0,
        )

    @contextmanager
    def _measuring(self, pairs: PairSource, num_pairs: int | None) -> Iterator[PairObjective]:
        batches = self._batches(pairs, num_pairs)
        with measuring(
            self.model, batches, self.loss, params=self.params, dtype=self.dtype, group=self.group
        ) as objective:
            yield objective

    def _spectrum(
        self,
        operator: LossOperator,
        matrix: str,
        method: str,
        options: SpectrumOptions,
        found: Solution,
        extra: _Extra,
        wall_seconds: float,
    ) -> HessianSpectrum:
        objective, pairs = operator.objective, found.pairs
        num_top, num_bottom = known_ends(pairs.values.tolist(), method, options.which)
        choice = operator.choice if isinstance(operator, HessianOperator) else None
        return HessianSpectrum(
            eigenvalues=tuple(pairs.values.tolist()),
            residuals=tuple(pairs.residuals.tolist()),
            error_bounds=tuple(pairs.error_bounds.tolist()),
            converged=pairs.converged,
            num_top=num_top,
            num_bottom=num_bottom,
            is_exhaustive=found.is_exhaustive,
            trace=found.trace or extra.trace,
            density=extra.density,
            sampling=found.sampling or extra.sampling,
            matrix=matrix,
            method=method,
            params=self.params if isinstance(self.params, str) else ", ".join(self.params),
            num_parameters=operator.dimension,
            num_pairs=objective.num_pairs,
            loss=objective.value(),
            num_products=operator.num_products,
            product=choice.product.name if choice else "gauss_newton",
            gradients_per_product=choice.gradients_per_product.get(choice.product.name) if choice else None,
            wall_seconds=wall_seconds,
            dtype=str(objective.dtype).removeprefix("torch."),
            seed=self.seed,
            status=SpectrumStatus.interrupted if found.is_interrupted else SpectrumStatus.complete,
            eigenvectors=pairs.vectors,
        )


@dataclass(frozen=True)
class _Extra:
    """What is estimated beside the eigenvalues."""

    trace: Estimate | None = None
    density: SpectralDensity | None = None
    sampling: tuple[Estimate, ...] = ()


def _extras(operator: LossOperator, found: Solution, options: SpectrumOptions, seed: int) -> _Extra:
    """Trace, density and sampling error, as far as they are asked for and the solver did not give them."""
    trace, density, pairs = found.trace, None, found.pairs
    removable = pairs if pairs.is_orthonormal and len(pairs.vectors) == len(pairs.values) else None
    if options.density_probes:
        density = spectral_density(
            operator,
            num_probes=options.density_probes,
            num_steps=options.density_steps,
            seed=seed + 1,
            found=removable,
        )
        trace = trace or density.moment(1)
    if trace is None and options.trace_products:
        trace = estimate_trace(operator, "deflated", options.trace_products, seed=seed + 1, found=removable)
    sampled = min(options.num_sampled, len(pairs.vectors))
    wanted = sampled and not found.sampling and isinstance(operator, HessianOperator)
    sampling = sampling_error(operator.objective, pairs.vectors[:sampled], seed=seed) if wanted else ()
    return _Extra(trace, density, sampling)
