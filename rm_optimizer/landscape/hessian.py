"""Public interface to the spectrum of a reward model's loss."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, MacroBatch, PackedPairBatch, PairBatch
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.loader import PairLoader
from rm_optimizer.errors import ConfigError, DataError, require_known
from rm_optimizer.evaluation.draws import FEWEST, PairSample, Prompts, draw_pairs, require_enough
from rm_optimizer.landscape.computation import ESTIMATES, SpectrumComputation, known_ends
from rm_optimizer.landscape.estimates.by_pair import clusters_of
from rm_optimizer.landscape.estimates.cross_fitting import FEW_PROMPTS
from rm_optimizer.landscape.operators.base import HessianOperator, LossOperator, OutputOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.landscape.operators.single_pairs import pairs_digest
from rm_optimizer.landscape.solvers.krylov import remove_states
from rm_optimizer.landscape.solvers.lanczos import End, Progress
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.records import ledger
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.landscape import SpectrumMethod, SpectrumOptions

Matrix = Literal["hessian", "gauss_newton", "fisher"]
_DIRECT = SpectrumOptions(num_probes=20, effective_rank=True)
"""Options of a call that names none."""
PairSource: TypeAlias = PairSample | str | os.PathLike[str] | Iterable[Any]
"""Pairs, a sample of them, rows, a table, the path of a file, or a loader of batches of pairs that ends."""
_log = logging.getLogger("rm_optimizer")


def _pairs_of(model: BradleyTerryRM, source: Any) -> Sequence[PreferencePair] | None:
    """The pairs of a data set, a file, a table, rows or `create_dataloader`; None for another loader.

    Raises:
        ConfigError: if the loader has the tokens of another template or length.
        TypeError: if the source is something else.
    """
    if isinstance(source, str | os.PathLike):
        return PreferenceDataset(os.fspath(source)).pairs
    if isinstance(source, PairLoader):
        own, given = model.renderer.identity(), source.renderer.identity()
        if differing := [name for name in own if own[name] != given[name]]:
            raise ConfigError(
                f"a loader of pairs must read text as the model does, and its {', '.join(differing)} differ; "
                "make it with create_dataloader(data, model)"
            )
        return source.pairs
    is_table = isinstance(source, Mapping) or hasattr(source, "columns") or hasattr(source, "column_names")
    if not is_table and not isinstance(source, Iterable):
        raise TypeError(f"pairs must be pairs, a data set, a file or a loader of pairs, got {type(source).__name__}")
    first = source[0] if isinstance(source, Sequence) and len(source) else None
    is_row = isinstance(first, Mapping) and "chosen_input_ids" not in first
    is_batches = not (first is None or is_row or isinstance(first, PreferencePair))
    if is_table or (isinstance(source, Sequence) and not is_batches):
        return PreferenceDataset(source, model).pairs
    return None


def _batches_of(loader: Any) -> Iterator[AnyPairBatch]:
    """The micro-batches of a loader; a mapping of tensors gets positions in the order of its pairs."""
    num_pairs = 0
    for item in loader:
        if isinstance(item, MacroBatch):
            yield from item.micro
        elif isinstance(item, PairBatch | PackedPairBatch):
            yield item
        elif isinstance(item, Mapping) and "chosen_input_ids" in item:
            yield PairBatch.of(item, num_pairs)
            num_pairs += len(item["chosen_input_ids"])
        else:
            raise DataError(f"a loader of pairs must give batches of pairs, got {type(item).__name__}")


@dataclass(eq=False, repr=False)
class HessianAnalyzer:
    """Analyzer of the curvature of a reward model's loss, which leaves the model unchanged.

    Args:
        model: the reward model.
        device: device to move the model to; None leaves it where it is.
        loss: training loss; None is the plain Bradley-Terry loss.
        params: parameters to derive by: `trainable`, `head`, `lora`, or patterns of parameter names.
        token_budget: most tokens of a micro-batch, padding included; it limits memory and does not change results.
        dtype: type to compute in; if the weights have another type, a copy is measured.
        seed: seed of all random vectors and of the draw of pairs.
        group: processes that hold shares of the pairs; None where this one has all.
    """

    model: BradleyTerryRM
    device: torch.device | str | None = None
    _: KW_ONLY
    loss: LossConfig | None = None
    params: str | Sequence[str] = TRAINABLE
    token_budget: int = 8192
    dtype: torch.dtype = torch.float32
    seed: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        require_bradley_terry(self.model)
        if self.device is not None:
            self.model.to(self.device)

    def batches_of(
        self, pairs: PairSource, num_pairs: int | None = None
    ) -> tuple[Sequence[AnyPairBatch], Prompts | None]:
        """Micro-batches of a source's pairs or of a draw, and their prompts.

        The prompts are None if the source has none.
        A loader of `create_dataloader` gives each of its pairs once. They are put into micro-batches anew, so that the
        loader and its pairs give equal numbers. The batches of another loader are read once and used unchanged.

        Args:
            pairs: pairs, a sample of them, rows, a table, the path of a file, or a loader.
            num_pairs: number of pairs to draw; None takes all. A loader of batches alone allows None only.

        Raises:
            ConfigError: if `num_pairs` is given for batches, or a loader has the tokens of another model.
            DataError: if fewer than two pairs remain, or the loader gives something else.
            TypeError: if the source is something else.
        """
        if isinstance(pairs, PairSample):
            return pairs.batches, pairs.prompts
        fewest = FEWEST if self.group is None else 0  # a process's share may be empty
        given = _pairs_of(self.model, pairs)
        if given is not None:
            budget = self.token_budget
            drawn = draw_pairs(self.model, given, num_pairs, self.seed, token_budget=budget, fewest=fewest)
            return drawn.batches, drawn.prompts
        if num_pairs is not None:
            raise ConfigError(
                "num_pairs draws from pairs, and a loader of batches was given; give pairs or a shorter loader"
            )
        batches = list(_batches_of(pairs))
        require_enough(sum(batch.num_pairs for batch in batches), fewest)
        return batches, None

    def compute_spectrum(
        self,
        pairs: PairSource,
        method: str = "lanczos",
        *,
        top_k: int = 20,
        matrix: Matrix | None = None,
        num_pairs: int | None = None,
        options: SpectrumOptions | None = None,
        with_density: bool = False,
        start: HessianSpectrum | None = None,
        prompts: Prompts | None = None,
        state_file: Path | None = None,
        on_iteration: Callable[[Progress], None] | None = None,
        on_product: Callable[[int], None] | None = None,
        progress: bool = True,
    ) -> HessianSpectrum:
        """Compute eigenvalues and, on request, trace, density and sampling error.

        Ctrl-C during `lanczos` or the estimates after it returns the values found, with the `status` `interrupted`.

        Args:
            pairs: pairs, a data set, rows, a table, the path of a file, or a loader of batches of pairs.
            method: `lanczos`, `power_iteration`, `full` (few parameters), `gauss_newton_exact` (from single pairs) or
                `pyhessian` (an extra, to compare with).
            top_k: number of eigenvalues to find, at each end if `options.which` is `both`.
            matrix: `hessian`, `gauss_newton` or `fisher`; None takes the method's own matrix, otherwise the Hessian.
            num_pairs: pairs to draw; None takes all.
            options: further quantities to compute, and their accuracy; None computes the trace with 20 products and the
                effective rank.
            with_density: True to estimate the density of all eigenvalues by `options.num_probes` random vectors. It
                also gives the trace.
            start: an earlier spectrum to start `lanczos` from, such as one of an earlier step of a run.
            prompts: number of each pair's prompt by its `pair_index`, needed for a loader only. Errors over pairs count
                pairs of one prompt as one.
            state_file: file of `lanczos`'s state, from which it continues after a kill; removed at the end.
            on_iteration: function called after each product of `lanczos`.
            on_product: function of the number of products, called by other methods and by the estimates that follow.
            progress: False shows no progress; a call with its own function shows none either.

        Raises:
            ConfigError: if an option is unknown or does not fit, the model cannot be differentiated twice, or `start`
                has no vectors of these parameters.
            DataError: if there are fewer than two pairs.
            TrainingDiverged: if the loss is not finite.
        """
        kind = matrix or ("gauss_newton" if method == "gauss_newton_exact" else "hessian")
        options, began = options or _DIRECT, time.perf_counter()
        _check_choices(method, kind, self.dtype, options)
        batches, known_prompts = self.batches_of(pairs, num_pairs)
        measured = measuring(
            self.model, batches, self.loss or LossConfig(), params=self.params, dtype=self.dtype, group=self.group
        )
        with ExitStack() as stack:
            if progress and on_iteration is None and on_product is None:
                show = stack.enter_context(ledger.progress("spectrum", "products"))
                on_iteration, on_product = lambda step: show(step.num_products, None), lambda count: show(count, None)
            objective = stack.enter_context(measured)
            operator: LossOperator = (
                HessianOperator(objective, product=options.product, graph_memory_bytes=options.memory_bytes)
                if kind == "hessian"
                else OutputOperator(objective, kind)
            )
            found = SpectrumComputation(
                operator=operator,
                method=method,
                top_k=top_k,
                options=options,
                with_density=with_density,
                seed=self.seed,
                clusters=clusters_of(objective.batches, prompts or known_prompts),
                start=None if start is None else _start(start, operator, method),
                state_file=state_file,
                on_iteration=on_iteration,
            )
            if found.num_sampled and (count := len(set(found.clusters))) < FEW_PROMPTS:
                _log.warning(
                    f"eigenvalues of {count} prompts are far too large, and their intervals over pairs too narrow; "
                    f"take at least {FEW_PROMPTS}, 256 or more are useful"
                )
            found.run(on_product or (lambda num_products: None))
            spectrum = self._spectrum(found, kind, found.seconds_before + time.perf_counter() - began)
        if state_file is not None and not found.is_interrupted:
            remove_states(state_file)
        return spectrum

    def _spectrum(self, found: SpectrumComputation, matrix: str, wall_seconds: float) -> HessianSpectrum:
        operator, pairs, objective = found.operator, found.pairs, found.operator.objective
        num_top, num_bottom = known_ends(pairs.values.tolist(), found.method, found.which)
        choice = operator.choice if isinstance(operator, HessianOperator) else None
        by_rows = "pair_gradients" if found.method == "gauss_newton_exact" else "reverse"
        return HessianSpectrum(
            eigenvalues=tuple(pairs.values.tolist()),
            residuals=tuple(pairs.residuals.tolist()),
            error_bounds=tuple(pairs.error_bounds.tolist()),
            converged=pairs.converged,
            num_top=num_top,
            num_bottom=num_bottom,
            num_overlooked=pairs.num_overlooked,
            sampling=tuple(found.sampling),
            matrix=matrix,
            params=self.params if isinstance(self.params, str) else ", ".join(self.params),
            num_parameters=operator.dimension,
            num_pairs=objective.num_pairs,
            loss=objective.value(),
            num_products=operator.num_products,
            product=choice.product.name if choice else by_rows,
            product_reason=choice.reason if choice else "the only way",
            gradients_per_product=choice.gradients_per_product.get(choice.product.name) if choice else None,
            wall_seconds=wall_seconds,
            dtype=dtype_name(objective.dtype),
            seed=self.seed,
            loss_options=json.dumps(vars(objective.loss), sort_keys=True),
            pairs_digest=pairs_digest(objective.batches) if self.group is None else "",
            weights_digest=weights_digest(self.model),
            status=SpectrumStatus.interrupted if found.is_interrupted else SpectrumStatus.complete,
            eigenvectors=pairs.vectors,
            **{name: getattr(found, name) for name in ESTIMATES},
        )


def _check_choices(method: str, matrix: str, dtype: torch.dtype, options: SpectrumOptions) -> None:
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
        require_known(name, got, known)
    require(dtype in (torch.float32, torch.float64), "dtype", "be torch.float32 or torch.float64", dtype)
    if method == "gauss_newton_exact" and matrix == "hessian":
        raise ConfigError(
            "method=gauss_newton_exact needs matrix=gauss_newton or fisher, got hessian; use method=lanczos"
        )
    if method == "pyhessian" and matrix != "hessian":
        raise ConfigError(f"method=pyhessian needs matrix=hessian, got {matrix}; use method=lanczos")
    unused = {
        "max_basis": method != "lanczos" and options.max_basis is not None,
        "keep_vectors=False": method != "lanczos" and not options.keep_vectors,
        f"max_products={options.max_products}": method not in ("lanczos", "power_iteration")
        and options.max_products is not None,
    }
    for option in (name for name, is_set in unused.items() if is_set):
        warnings.warn(f"{option} is not used by method={method}; leave it out", stacklevel=3)


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
