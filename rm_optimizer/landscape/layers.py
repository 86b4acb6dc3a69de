"""Curvature layer by layer: the diagonal blocks of the Gauss-Newton matrix and of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.landscape.estimates.by_pair import clusters_of
from rm_optimizer.landscape.estimates.cross_fitting import CrossFit, cross_fit_gram
from rm_optimizer.landscape.estimates.trace import ProbeSums
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, HessianOperator, SymmetricOperator
from rm_optimizer.landscape.operators.gauss_newton import CurvatureRows
from rm_optimizer.landscape.operators.parameters import parameter_blocks, select_parameters
from rm_optimizer.landscape.operators.support import SupportedOperator
from rm_optimizer.landscape.operators.vectors import RandomVectors
from rm_optimizer.landscape.solvers.krylov import part_file
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.spectrum import SpectrumStatus
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.schema.landscape import SpectrumOptions

Columns = Sequence[tuple[int, int]]
"""Ranges of positions in the long vector of parameters."""


@dataclass(frozen=True)
class TopEigenvalue:
    """Largest algebraic eigenvalue of a block of the Hessian.

    Args:
        value: the eigenvalue.
        error_bound: bound on its error.
        converged: True if it is within the requested tolerance, as in `Eigenpairs`.
        num_products: Hessian-vector products spent.
        cross_fit: cross-fitted eigenvalue; None if it was not requested, or there are too few prompts.
    """

    value: float
    error_bound: float
    converged: bool
    num_products: int
    cross_fit: CrossFit | None = None


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature over the parameters of one layer, with all other parameters fixed.

    Args:
        block: name of the layer: `embeddings`, `layer 1` … or `output` for everything after the layers.
        num_parameters: number of its parameters.
        gauss_newton: eigenvalues of the Gauss-Newton block, descending; all others are 0.
        cross_fit: cross-fitted value of the largest; None if there are too few prompts.
        gauss_newton_trace: trace of the Gauss-Newton block, with its interval over pairs.
        trace: trace of the Hessian's block, with its error over random vectors.
        hessian_top: largest eigenvalue of the Hessian's block; None where it was not searched for.
    """

    block: str
    num_parameters: int
    gauss_newton: tuple[float, ...]
    cross_fit: CrossFit | None
    gauss_newton_trace: Estimate
    trace: Estimate
    hessian_top: TopEigenvalue | None = None

    @property
    def crossed(self) -> Estimate | None:
        """The largest Gauss-Newton eigenvalue cross-fitted; None where it is not known."""
        return self.cross_fit.values[0] if self.cross_fit else None

    @property
    def hessian_crossed(self) -> Estimate | None:
        """The Hessian's largest eigenvalue cross-fitted; None where it is not known."""
        top = self.hessian_top
        return top.cross_fit.values[0] if top and top.cross_fit else None


@dataclass(frozen=True)
class LayerCurvature(LandscapeRecord, indent=1):
    """Curvature of each layer of a model.

    Args:
        blocks: blocks from the input to the head.
        missing: blocks whose search for the Hessian's largest eigenvalue an interruption left out.
        num_pairs: pairs that the loss is averaged over.
        num_prompts: different prompts among them.
        seed: seed of the pairs, starting vectors and probes.
        source: checkpoint, step and pairs, in words.
    """

    blocks: tuple[BlockCurvature, ...]
    missing: tuple[str, ...]
    num_pairs: int
    num_prompts: int
    seed: int
    source: str = ""


def block_names(measured_loss: MeasuredLoss) -> dict[str, tuple[str, ...]]:
    """Selected parameters of each layer; layers without any are omitted."""
    chosen = set(select_parameters(measured_loss.model, measured_loss.params).names)
    blocks = {
        name: tuple(chosen.intersection(block.names)) for name, block in parameter_blocks(measured_loss.model).items()
    }
    return {name: names for name, names in blocks.items() if names}


def curvature_of_blocks(
    measured_loss: MeasuredLoss, options: SpectrumOptions, on_product: Callable[[int], None] = lambda num_products: None
) -> tuple[BlockCurvature, ...]:
    """Gauss-Newton spectra of all blocks from gradients of single pairs, and Hessian traces from shared random vectors.

    A block `G_b = B_b^T B_b` of the Gauss-Newton matrix has the same nonzero eigenvalues as `B_b B_b^T`, where `B_b`
    holds the block's columns of the rows of all pairs. See `block_traces` for the Hessian.

    Args:
        measured_loss: model, pairs and loss.
        options: `num_probes` for the traces, one Hessian-vector product each, `product`, and the memory of the rows.
        on_product: function of the products so far.
    """
    sample, names = measured_loss.sample, block_names(measured_loss)
    sizes = {name: select_parameters(measured_loss.model, of_block).num_parameters for name, of_block in names.items()}
    with measured_loss.measuring() as objective:
        hessian = HessianOperator(objective, product=options.product)
        hessian.on_product = on_product
        clusters = clusters_of(objective.batches, sample.prompts)
        rows = CurvatureRows(objective, "gauss_newton", options.memory_bytes)
        blocks = {name: rows.support.columns(of_block) for name, of_block in names.items()}
        spectra = dict(zip(blocks, map(rows.spectrum, rows.grams([*blocks.values()])), strict=True))
        known = {name: gram.trace for name, gram in spectra.items()}
        matrix = SupportedOperator(hessian, rows.support)
        traces = block_traces(matrix, rows.apply, blocks, known, options.num_probes, seed=sample.seed)
    return tuple(
        BlockCurvature(
            block=name,
            num_parameters=sizes[name],
            gauss_newton=tuple(gram.values.tolist()),
            cross_fit=cross_fit_gram(gram, 1, clusters=clusters, seed=sample.seed),
            gauss_newton_trace=gram.bootstrap(1, clusters=clusters, seed=sample.seed)[-1],
            trace=traces[name],
        )
        for name, gram in spectra.items()
    )


def block_traces(
    hessian: SymmetricOperator,
    gauss_newton: Callable[[Tensor], Tensor],
    blocks: Mapping[str, Columns],
    known: Mapping[str, float],
    num_probes: int,
    *,
    seed: int,
) -> dict[str, Estimate]:
    """Traces of all diagonal blocks of the Hessian from the same random signs over all parameters.

    With `R = H - G` and `z_b` the part of `z` in block `b`, `tr(G_b) + z_b^T (R z)_b` has mean `tr(H_b)`. Its variance
    is `2 (||R_bb||_F^2 - ||diag R_bb||^2) + sum_{c != b} ||R_bc||_F^2`. Vectors over one block (Hutchinson, 1990) would
    avoid the sum over other blocks, but cost products for each block. `tr(G_b)` is known and `G z` is computed
    from its rows, so the Gauss-Newton matrix adds nothing to the variance. The vectors are independent, and the
    interval over them is Student's, with a variance of at least `ProbeSums.least_variance_of_block`. Estimates of
    different blocks share their vectors and are correlated.

    Args:
        hessian: the Hessian `H`.
        gauss_newton: products of the Gauss-Newton matrix `G` of the same loss with the rows of a block of vectors.
        blocks: positions of each block.
        known: `tr(G_b)` of each block.
        num_probes: random vectors, at least 2.
        seed: seed of the random vectors.
    """
    random = RandomVectors(hessian, seed)
    sums = {name: ProbeSums() for name in blocks}
    for start in range(0, num_probes, VECTORS_AT_ONCE):  # few at a time, so that memory does not grow with their number
        probes = random.signs(min(VECTORS_AT_ONCE, num_probes - start))
        images = hessian.apply(probes) - gauss_newton(probes)
        for name, ranges in blocks.items():
            parts = (torch.cat([rows[:, slice(*columns)] for columns in ranges], dim=1) for rows in (probes, images))
            for probe, image in zip(*parts, strict=True):
                sums[name].add(probe, image)
    return {
        name: student_mean(known[name] + np.array(each.forms), least_variance=each.least_variance_of_block)
        for name, each in sums.items()
    }


def top_eigenvalues(
    measured_loss: MeasuredLoss,
    blocks: Sequence[BlockCurvature],
    options: SpectrumOptions,
    *,
    state_file: Path | None = None,
    on_iteration: Callable[[str, Progress], None] = lambda block, progress: None,
) -> Iterator[BlockCurvature]:
    """Search each block of the Hessian for its largest eigenvalue, and yield the blocks with the results.

    A product with the whole Hessian mixes the blocks, so each search needs its own products. Cross-fitting needs
    about as many again. Blocks yielded before an interruption stay valid.

    Args:
        measured_loss: model, pairs and loss.
        blocks: blocks to search.
        options: accuracy and cost of each search; `num_sampled` of 1 cross-fits each.
        state_file: file next to which each block keeps its state until its turn has ended; None keeps no state.
        on_iteration: function of the block and its search, called after each product.

    Raises:
        KeyboardInterrupt: if the user stopped a search; it continues from its file.
    """
    names, options = block_names(measured_loss), replace(options, which="largest", num_probes=0)
    for block in blocks:
        found = replace(measured_loss, params=names[block.block]).analyzer.compute_spectrum(
            measured_loss.sample,
            top_k=1,
            options=options,
            state_file=part_file(state_file, list(names).index(block.block)),
            on_iteration=partial(on_iteration, block.block),
        )
        if found.status == SpectrumStatus.interrupted:
            raise KeyboardInterrupt
        crossed = found.cross_fit
        top = TopEigenvalue(
            found.eigenvalues[0],
            found.error_bounds[0],
            found.converged[0],
            found.num_products + (crossed.num_products if crossed else 0),
            crossed,
        )
        options = replace(options, product=found.product)  # the cheapest method for the first block serves the others
        yield replace(block, hessian_top=top)
