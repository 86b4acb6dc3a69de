"""Picture, table and rows of curvature layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature
from rm_optimizer.landscape.surface.results import Row
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import INK, Panel, new_figure
from rm_optimizer.reporting.landscape.spectrum import named
from rm_optimizer.reporting.landscape.surfaces import sizes
from rm_optimizer.reporting.tables import Cell


def layer_drawings(result: LayerCurvature) -> list[Drawing]:
    """The heat map of the blocks."""
    rows = [*map(layer_row, result.blocks)]
    return [Drawing("layers", plot_layers(result), "Curvature of each layer's block", rows)]


def layer_table(result: LayerCurvature) -> dict[str, Cell]:
    """Rows for `summary_table`: a sentence on each block."""
    return sizes(result) | {item.block: _block(item) for item in result.blocks}


def plot_layers(result: LayerCurvature) -> Figure:
    """Heat map of Gauss-Newton and Hessian numbers for each layer's block, with errors in the cells."""
    partial = f"PARTIAL, without the search in {', '.join(result.missing)}; " if result.missing else ""
    pairs = f"n = {result.num_pairs:,} pairs of {result.num_prompts:,} prompts; seed {result.seed}"
    tops = [item.hessian_top for item in result.blocks if item.hessian_top]
    starred = "" if all(top.converged for top in tops) else "; *: not converged"
    errors = "; ±: over pairs, probes" + (", error bound" if tops else "")
    caption = f"{partial}{pairs}{errors}{starred}; color: within its column{named(result.source)}"
    figure, (axes,) = new_figure("Curvature layer by layer", caption)
    columns = _layer_columns(result)
    figure.set_size_inches(1.2 + 1.45 * len(columns), max(3.2, 1.9 + 0.36 * len(result.blocks)))
    for position, values in enumerate(columns.values()):
        _draw_column(axes, position, np.array(values), [_cells(item)[position] for item in result.blocks])
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_yticks(range(len(result.blocks)), [f"{item.block} ({item.num_parameters:,})" for item in result.blocks])
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(result.blocks) - 0.5, -0.5))
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def layer_row(item: BlockCurvature) -> Row:
    """Numbers of a block by name."""
    top, crossed, held = item.hessian_top, item.crossed, item.hessian_crossed
    return {
        "block": item.block,
        "num_parameters": item.num_parameters,
        "gauss_newton_largest": item.gauss_newton[0],
        "gauss_newton_cross_fitted": crossed.value if crossed else None,
        "gauss_newton_trace": item.gauss_newton_trace.value,
        "gauss_newton_trace_standard_error": item.gauss_newton_trace.standard_error,
        "hessian_trace": item.trace.value,
        "hessian_trace_standard_error": item.trace.standard_error,
        "hessian_largest": top.value if top else None,
        "hessian_error_bound": top.error_bound if top else None,
        "hessian_converged": top.converged if top else None,
        "hessian_cross_fitted": held.value if held else None,
        "hessian_cross_fitted_low": held.low if held else None,
        "hessian_cross_fitted_high": held.high if held else None,
    }


def _layer_columns(result: LayerCurvature) -> dict[str, list[float]]:
    """Numbers of each block by column heading."""
    columns = {
        "Gauss-Newton\nlargest": [item.gauss_newton[0] for item in result.blocks],
        "Gauss-Newton\ncross-fitted": [_value_or_nan(item.crossed) for item in result.blocks],
        "Gauss-Newton\ntrace": [item.gauss_newton_trace.value for item in result.blocks],
        "Hessian\ntrace": [item.trace.value for item in result.blocks],
    }
    found = [item.hessian_top for item in result.blocks]
    if any(found):
        columns["Hessian\nlargest"] = [top.value if top else math.nan for top in found]
    if any(top.cross_fit for top in found if top):
        columns["Hessian\ncross-fitted"] = [_value_or_nan(item.hessian_crossed) for item in result.blocks]
    return columns


def _draw_column(axes: Panel, position: int, values: np.ndarray, texts: Sequence[str]) -> None:
    """Draw one column of cells, colored on its own scale, which is logarithmic for both signs."""
    known = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
    largest = float(np.abs(known).max()) or 1.0
    low, high = float(known.min()), float(known.max())
    norm: Normalize = SymLogNorm(linthresh=0.1 * largest, vmin=-largest, vmax=largest)
    colors = "RdBu_r"
    if low > 0:  # one sign: from pale to dark over the range of the column
        norm, colors = LogNorm(low / (high / low) ** 0.3 / 1.1, 1.1 * high), "Blues"
    extent = (position - 0.48, position + 0.48, len(values) - 0.5, -0.5)
    axes.imshow(values[:, None], aspect="auto", cmap=colors, norm=norm, extent=extent)
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        share = float(norm(value)) if math.isfinite(value) else 0.5
        is_dark = share > 0.6 if low > 0 else abs(share - 0.5) > 0.3
        color = "white" if is_dark else INK
        axes.text(position, row, text, ha="center", va="center", fontsize=8.5, color=color)


def _value_or_nan(estimate: Estimate | None) -> float:
    return math.nan if estimate is None else estimate.value


def _cells(item: BlockCurvature) -> tuple[str, ...]:
    top = item.hessian_top
    found = "n/a" if top is None else f"{top.value:.3g} ± {top.error_bound:.1g}" + ("" if top.converged else " *")
    estimates = (item.crossed, item.gauss_newton_trace, item.trace)
    return f"{item.gauss_newton[0]:.3g}", *map(_with_error, estimates), found, _with_error(item.hessian_crossed)


def _with_error(estimate: Estimate | None) -> str:
    if estimate is None:
        return "n/a"
    return f"{estimate.value:.3g}" + ("" if estimate.standard_error is None else f" ± {estimate.standard_error:.2g}")


def _block(item: BlockCurvature) -> str:
    crossed = f"cross-fitted {item.crossed.value:.3g}" if item.crossed else "not cross-fitted: too few prompts"
    largest = f"Gauss-Newton {item.gauss_newton[0]:.4g} ({crossed}), "
    traces = f"traces {item.gauss_newton_trace.value:.3g} and {item.trace.value:.3g} of the Hessian"
    top, half = item.hessian_top, item.hessian_crossed
    held = f" (cross-fitted {half.value:.3g})" if half else ""
    return largest + traces + (f", its largest {top.value:.4g} ± {top.error_bound:.1g}{held}" if top else "")
