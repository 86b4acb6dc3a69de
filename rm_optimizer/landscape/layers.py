"""Curvature layer by layer: top eigenvalue and trace of each diagonal block of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.trace import deflated_trace
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.operators.base import HessianOperator
from rm_optimizer.landscape.operators.parameters import parameter_blocks, select_parameters
from rm_optimizer.landscape.operators.products import ProductName
from rm_optimizer.landscape.solvers.lanczos import Progress, lanczos
from rm_optimizer.landscape.solvers.overlooked import with_overlooked
from rm_optimizer.landscape.solvers.support import SupportedOperator
from rm_optimizer.records.codec import JsonRecord


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature over the parameters of one layer, all others held.

    Args:
        block: `embeddings`, `layer 1` … or `output`, whatever follows the layers.
        num_parameters: numbers in it.
        top_eigenvalue: largest algebraic eigenvalue of the block.
        error_bound: bound on the error of the eigenvalue.
        converged: True if the residual is within the requested tolerance.
        trace: of the block, with the error of its probes.
        num_products: Hessian-vector products spent.
    """

    block: str
    num_parameters: int
    top_eigenvalue: float
    error_bound: float
    converged: bool
    trace: Estimate
    num_products: int


@dataclass(frozen=True)
class LayerCurvature(JsonRecord, indent=1):
    """Curvature of each layer of a model.

    Args:
        blocks: from the input to the head.
        missing: blocks that an interruption left out.
        num_pairs: pairs that the loss is averaged over.
        num_prompts: different prompts among them.
        seed: of the pairs, starting vectors and probes.
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
    measured_loss: MeasuredLoss,
    blocks: Mapping[str, tuple[str, ...]],
    *,
    tolerance: float,
    num_probes: int,
    max_products: int | None = None,
    on_iteration: Callable[[str, Progress], None] = lambda block, progress: None,
) -> Iterator[BlockCurvature]:
    """Measure one block after the other; blocks yielded before an interruption stay valid.

    Args:
        measured_loss: model, pairs and loss.
        blocks: parameters of each block, as `block_names` gives them.
        tolerance: residual of a top eigenvalue, relative to it.
        num_probes: probes of a trace, one product each.
        max_products: products at most of a top eigenvalue.
        on_iteration: function called after each product of a top eigenvalue.
    """
    method: ProductName = "auto"
    for block, names in blocks.items():
        with replace(measured_loss, params=names).measuring() as objective:
            hessian = HessianOperator(objective, product=method)
            method = hessian.product  # type: ignore[assignment]  # the cheapest of the first block serves the others
            matrix = SupportedOperator(hessian)
            found = lanczos(
                matrix,
                1,
                tolerance=tolerance,
                max_products=max_products,
                seed=measured_loss.sample.seed,
                on_iteration=lambda progress, block=block: on_iteration(block, progress),  # type: ignore[misc]
            )
            found = with_overlooked(matrix, found, "largest", tolerance=tolerance, seed=measured_loss.sample.seed + 2)
            top = matrix.widened(found)
            trace = deflated_trace(hessian, top, num_probes, seed=measured_loss.sample.seed)
            yield BlockCurvature(
                block=block,
                num_parameters=hessian.dimension,
                top_eigenvalue=float(top.values[0]),
                error_bound=float(top.error_bounds[0]),
                converged=top.converged[0],
                trace=trace,
                num_products=top.num_products + num_probes,
            )
