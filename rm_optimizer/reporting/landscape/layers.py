"""Picture, table and rows of curvature layer by layer."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature
from rm_optimizer.landscape.surface.grid import Row
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import INK, new_figure
from rm_optimizer.reporting.landscape.spectrum import named
from rm_optimizer.reporting.landscape.surfaces import sizes
from rm_optimizer.reporting.tables import Cell


def layer_drawings(result: LayerCurvature) -> list[Drawing]:
    """The heat map of the blocks."""
    rows = [*map(layer_row, result.blocks)]
    return [Drawing("layers", plot_layers(result), "Curvature of each layer's block", rows)]


def layer_table(result: LayerCurvature) -> dict[str, Cell]:
    """Rows for `summary_table`: a sentence on each block."""
    rows = sizes(result)
    for item in result.blocks:
        crossed = f"cross-fitted {item.crossed.value:.3g}" if item.crossed else "not cross-fitted: too few prompts"
        text = f"Gauss-Newton {item.gauss_newton[0]:.4g} ({crossed}), traces {item.gauss_newton_trace.value:.3g}"
        text += f" and {item.trace.value:.3g} of the Hessian"
        if (top := item.hessian_top) is not None:
            held = f" (cross-fitted {item.hessian_crossed.value:.3g})" if item.hessian_crossed else ""
            text += f", its largest {top.value:.4g} ± {top.error_bound:.1g}{held}"
        rows[item.block] = text
    return rows


def plot_layers(result: LayerCurvature) -> Figure:
    """Heat map of curvature numbers for each layer's block.

    They are of the Gauss-Newton matrix and the Hessian, with errors in the cells.
    """
    blocks = result.blocks
    partial = f"PARTIAL, without the search in {', '.join(result.missing)}; " if result.missing else ""
    pairs = f"n = {result.num_pairs:,} pairs of {result.num_prompts:,} prompts; seed {result.seed}"
    tops = [item.hessian_top for item in blocks if item.hessian_top]
    starred = "" if all(top.converged for top in tops) else "; *: not converged"
    errors = "; ±: over pairs, probes" + (", error bound" if tops else "")
    caption = f"{partial}{pairs}{errors}{starred}; color: within its column{named(result.source)}"
    figure, (axes,) = new_figure("Curvature layer by layer", caption)
    columns = {
        "Gauss-Newton\nlargest": [(item.gauss_newton[0], f"{item.gauss_newton[0]:.3g}") for item in blocks],
        "Gauss-Newton\ncross-fitted": [_cell(item.crossed) for item in blocks],
        "Gauss-Newton\ntrace": [_cell(item.gauss_newton_trace) for item in blocks],
        "Hessian\ntrace": [_cell(item.trace) for item in blocks],
    }
    if tops:
        columns["Hessian\nlargest"] = [
            (top.value, f"{top.value:.3g} ± {top.error_bound:.1g}{'' if top.converged else ' *'}")
            if (top := item.hessian_top)
            else (math.nan, "n/a")
            for item in blocks
        ]
    if any(top.cross_fit for top in tops):
        columns["Hessian\ncross-fitted"] = [_cell(item.hessian_crossed) for item in blocks]
    figure.set_size_inches(1.2 + 1.45 * len(columns), max(3.2, 1.9 + 0.36 * len(blocks)))
    for position, cells in enumerate(columns.values()):
        values = np.array([value for value, _ in cells])
        known = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
        largest, low, high = float(np.abs(known).max()) or 1.0, float(known.min()), float(known.max())
        norm: Normalize = SymLogNorm(linthresh=0.1 * largest, vmin=-largest, vmax=largest)  # for both signs
        colors = "RdBu_r"
        if low > 0:  # one sign: from pale to dark over the range of the column
            norm, colors = LogNorm(low / (high / low) ** 0.3 / 1.1, 1.1 * high), "Blues"
        extent = (position - 0.48, position + 0.48, len(values) - 0.5, -0.5)
        axes.imshow(values[:, None], aspect="auto", cmap=colors, norm=norm, extent=extent)
        for row, (value, text) in enumerate(cells):
            share = float(norm(value)) if math.isfinite(value) else 0.5
            is_dark = share > 0.6 if low > 0 else abs(share - 0.5) > 0.3
            color = "white" if is_dark else INK
            axes.text(position, row, text, ha="center", va="center", fontsize=8.5, color=color)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_yticks(range(len(blocks)), [f"{item.block} ({item.num_parameters:,})" for item in blocks])
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(blocks) - 0.5, -0.5))
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _cell(estimate: Estimate | None) -> tuple[float, str]:
    """A number and its text."""
    if estimate is None:
        return math.nan, "n/a"
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.2g}"
    return estimate.value, f"{estimate.value:.3g}{error}"


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
