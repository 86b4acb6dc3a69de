"""Pictures of curvature: the ends of the spectrum, its density, its course during training, and layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.cross_fitting import TopOfSamples
from rm_optimizer.landscape.estimates.density import DensityCurve
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature
from rm_optimizer.reporting.plots import History
from rm_optimizer.reporting.style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    VERMILION,
    captioned_figure,
    count_ticks,
    draw_legend,
    draw_legend_above,
    draw_legend_below,
    stacked_panels,
)

_EMPTY = ("", None)
CURVATURE, TRACE = "curvature_top_eigenvalue", "curvature_trace"
SHARPNESS, LIMIT = "curvature_preconditioned_sharpness", "curvature_stability_limit"
"""Columns of `metrics.csv` in a run with `training.hessian.enabled`."""
_FEW = 3
"""Number of eigenvalues up to which the inset needs extra room."""
_MOST_BELOW = 3
"""Most cross-fitted values drawn under a density."""


@dataclass(frozen=True)
class Place:
    """Position of an eigenvalue in the whole spectrum.

    Args:
        end: `largest` or `smallest`.
        rank: rank counted from that end, from 1.
    """

    end: str
    rank: int


def places_of(num_top: int, num_bottom: int, count: int) -> tuple[Place, ...]:
    """Places of eigenvalues in descending order, each counted from the nearer end from which its rank is known.

    Args:
        num_top: number of the first that are the largest of all.
        num_bottom: number of the last that are the smallest of all; every eigenvalue is among one of the two.
        count: number of eigenvalues.

    Example:
        >>> [f"{place.end} {place.rank}" for place in places_of(2, 1, 3)]
        ['largest 1', 'largest 2', 'smallest 1']
    """
    from_top = min(num_top, max(count - num_bottom, (count + 1) // 2))
    return tuple(
        Place("largest", index + 1) if index < from_top else Place("smallest", count - index) for index in range(count)
    )


def plot_spectrum(
    values: Sequence[float],
    errors: Sequence[float],
    *,
    title: str,
    caption: str,
    places: Sequence[Place],
    cross_fitted: Sequence[Estimate] = (),
    by_num_pairs: Sequence[TopOfSamples] = (),
) -> Figure:
    """Eigenvalues by rank, positive and negative ones in different colors, with error bars.

    Args:
        values: eigenvalues, descending.
        errors: bound on the error of each.
        places: place of each eigenvalue: the end of the spectrum to count from, and the rank from there.
        title: name of the matrix.
        caption: pairs, parameters, seed.
        cross_fitted: the first eigenvalues cross-fitted, with their interval over pairs.
        by_num_pairs: largest eigenvalue of samples of the pairs, for the inset.
    """
    figure, (axes,) = captioned_figure(title, caption)
    heights, bars = np.asarray(values, dtype=float), np.asarray(errors, dtype=float)
    rank = np.arange(1, len(heights) + 1)
    for members, color, word in ((heights >= 0, BLUE, "positive"), (heights < 0, VERMILION, "negative")):
        if members.any():
            axes.vlines(rank[members], 0, heights[members], color=color, linewidth=1.0, alpha=0.35)
            axes.errorbar(
                rank[members], heights[members], yerr=bars[members], color=color, marker="o", markersize=5,
                linestyle="none", elinewidth=1.3, capsize=3, label=f"{word}; bar: error bound",
            )  # fmt: skip
    _draw_cross_fitted(axes, cross_fitted)
    axes.axhline(0.0, color=GRAY, linewidth=1.0)
    axes.set_yscale("symlog", linthresh=_linear_below(heights))
    has_inset = len(by_num_pairs) > 1
    room = 1.9 if has_inset and len(heights) <= _FEW else 0.7
    axes.set(ylabel=f"eigenvalue (log; linear below {_linear_below(heights):.2g})", xlim=(0.3, len(heights) + room))
    _draw_places(axes, places)
    shown = [*heights, *(end for item in cross_fitted for end in (item.low, item.high) if end is not None)]
    lowest, highest = float(min(shown)), float(max(shown))
    axes.set_ylim(2.5 * lowest if lowest < 0 else 0.0, 2.5 * highest if highest > 0 else 0.0)
    draw_legend(axes)
    if has_inset:
        _draw_by_num_pairs(axes, by_num_pairs)
    return figure


def plot_density(
    curve: DensityCurve, *, top: Sequence[float], title: str, caption: str, cross_fitted: Sequence[Estimate] = ()
) -> Figure:
    """Share of a sample's eigenvalues at each value, on a logarithmic axis, with the computed eigenvalues marked.

    Args:
        curve: the density.
        top: eigenvalues that were computed one by one.
        cross_fitted: the largest of them cross-fitted, with their interval over pairs.
        title: name of the matrix.
        caption: pairs, parameters, probes, seed.
    """
    figure, (axes,) = captioned_figure(title, caption)
    highest = float(curve.density.max())
    floor = max(float(curve.density[curve.density > 0].min()), 1e-9 * highest)
    axes.plot(curve.grid, np.maximum(curve.density, floor / 2), color=BLUE, linewidth=1.7, label="density")
    low, high = (np.maximum(curve.density + side * curve.standard_error, floor / 2) for side in (-1, 1))
    if np.isfinite(curve.standard_error).all():
        axes.fill_between(curve.grid, low, high, color=BLUE, alpha=0.25, lw=0, label="± 1 standard error over probes")
    _draw_computed(axes, top, 2 * floor)
    _draw_cross_fitted_below(axes, cross_fitted, 5 * floor)
    axes.set_yscale("log")
    axes.set(xlabel="eigenvalue of this sample", ylabel="share of eigenvalues per unit", ylim=(floor, 3 * highest))
    draw_legend_below(axes)
    return figure


def plot_training_curvature(history: History, *, caption: str) -> Figure:
    """Lower bound of the top eigenvalue, trace with its standard error, and the edge of stability over a run's steps.

    The residual is not drawn, since it gives no upper bound on the top eigenvalue. The limit of stability is drawn with
    the preconditioned sharpness if the optimizer has a preconditioner, else with the top eigenvalue.

    Args:
        history: rows of `metrics.csv` with the columns of `training.hessian.enabled`.
        caption: pairs, seed.
    """
    rows = [row for row in history if row.get(CURVATURE) not in _EMPTY]
    preconditioned = [row for row in rows if _is_known(row, SHARPNESS)]
    figure, panels = stacked_panels("Curvature during training", caption, count=3 if preconditioned else 2)
    _draw_course(panels[0], rows, CURVATURE, "top eigenvalue, at least", VERMILION)
    _draw_course(panels[1], rows, TRACE, "trace; bar: standard error", BLUE, error=f"{TRACE}_standard_error")
    if preconditioned:
        _draw_course(panels[2], preconditioned, SHARPNESS, "preconditioned sharpness, at least", GREEN)
        _draw_limit(panels[2], preconditioned, SHARPNESS)
    else:
        _draw_limit(panels[0], rows, CURVATURE)
    for axes, label in zip(panels, ("top eigenvalue", "trace", "preconditioned"), strict=False):
        axes.set_ylabel(label)
        draw_legend_above(axes)
    panels[-1].set_xlabel("optimizer step")
    return figure


def _layer_columns(result: LayerCurvature) -> dict[str, list[float]]:
    """Numbers of each block by column heading."""
    columns = {
        "Gauss-Newton\nlargest": [item.gauss_newton[0] for item in result.blocks],
        "Gauss-Newton\ncross-fitted": [value_or_nan(item.crossed) for item in result.blocks],
        "Gauss-Newton\ntrace": [item.gauss_newton_trace.value for item in result.blocks],
        "Hessian\ntrace": [item.trace.value for item in result.blocks],
    }
    found = [item.hessian_top for item in result.blocks]
    if any(found):
        columns["Hessian\nlargest"] = [top.value if top else math.nan for top in found]
    if any(top.cross_fit for top in found if top):
        columns["Hessian\ncross-fitted"] = [value_or_nan(item.hessian_crossed) for item in result.blocks]
    return columns


def plot_layers(result: LayerCurvature) -> Figure:
    """Heat map of Gauss-Newton and Hessian numbers for each layer's block, with errors in the cells."""
    partial = f"PARTIAL, without the search in {', '.join(result.missing)}; " if result.missing else ""
    pairs = f"n = {result.num_pairs:,} pairs of {result.num_prompts:,} prompts; seed {result.seed}"
    tops = [item.hessian_top for item in result.blocks if item.hessian_top]
    starred = "" if all(top.converged for top in tops) else "; *: not converged"
    errors = "; ±: over pairs, probes" + (", error bound" if tops else "")
    caption = f"{partial}{pairs}{errors}{starred}; color: within its column"
    caption += f"; {result.source}" if result.source else ""
    figure, (axes,) = captioned_figure("Curvature layer by layer", caption)
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


def has_training_curvature(history: History) -> bool:
    """True if a run measured its curvature."""
    return any(row.get(CURVATURE) not in _EMPTY for row in history)


def _draw_places(axes: Axes, places: Sequence[Place]) -> None:
    """Label the axis with ranks from either end, and draw a line between the two ends."""
    step = next(step for step in (1, 5, 10, 50, 100, len(places)) if len(places) <= 14 * step)
    shown = [index for index, place in enumerate(places) if place.rank == 1 or place.rank % step == 0]
    least = len(places) / 25
    shown = [index for i, index in enumerate(shown) if i == 0 or index - shown[i - 1] >= least]
    axes.set_xticks([index + 1 for index in shown], [str(places[index].rank) for index in shown])
    ends = list(dict.fromkeys(place.end for place in places))
    for after, (before, place) in enumerate(pairwise(places), start=1):
        if before.end != place.end:
            axes.axvline(after + 0.5, color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlabel("rank from the " + " | from the ".join(ends))


def _draw_cross_fitted(axes: Axes, cross_fitted: Sequence[Estimate]) -> None:
    """Draw cross-fitted values beside the sample's, with their intervals."""
    known = [
        (i + 1.25, e.value, e.low, e.high)
        for i, e in enumerate(cross_fitted)
        if e.low is not None and e.high is not None
    ]
    if not known:
        return
    where, value, low, high = (np.array(column, dtype=float) for column in zip(*known, strict=True))
    axes.errorbar(
        where, value, yerr=np.clip([value - low, high - value], 0, None), color=ORANGE, marker="D", markersize=4,
        linestyle="none", elinewidth=2.0, capsize=2, label="cross-fitted; bar: 95 % over pairs",
    )  # fmt: skip


def _draw_computed(axes: Axes, top: Sequence[float], height: float) -> None:
    """Draw the eigenvalues that were computed one by one, positive and negative ones in different colors."""
    for members, color, word in (
        ([value for value in top if value >= 0], VERMILION, "positive"),
        ([value for value in top if value < 0], INK, "negative"),
    ):
        if members:
            axes.plot(
                members, np.full(len(members), height), color=color, marker="|", markersize=11, markeredgewidth=1.4,
                linestyle="none", label=f"{len(members)} {word} eigenvalue{'s' * (len(members) > 1)}, computed"
            )  # fmt: skip


def _draw_cross_fitted_below(axes: Axes, cross_fitted: Sequence[Estimate], height: float) -> None:
    """Draw cross-fitted values under a density, with their intervals along its axis."""
    first = cross_fitted[:_MOST_BELOW]
    known = [(e.value, e.low, e.high) for e in first if e.low is not None and e.high is not None]
    if not known:
        return
    value, low, high = np.array(known, dtype=float).T
    axes.errorbar(
        value, height * 2.0 ** np.arange(len(value)), xerr=np.clip([value - low, high - value], 0, None), color=ORANGE,
        marker="D", markersize=4, linestyle="none", elinewidth=2.0, capsize=2,
        label=f"the largest {len(value)} cross-fitted, from below; 95 % over pairs",
    )  # fmt: skip


def _draw_by_num_pairs(axes: Axes, by_num_pairs: Sequence[TopOfSamples]) -> None:
    """Draw an inset with the largest eigenvalue of quarters, halves and all of the pairs."""
    inset = axes.inset_axes((0.64, 0.55, 0.33, 0.22))
    counts = [sample.num_pairs for sample in by_num_pairs]
    for sample in by_num_pairs:
        inset.plot([sample.num_pairs] * len(sample.values), sample.values, color=BLUE, marker="o", markersize=3, lw=0)
    inset.plot(counts, [float(np.mean(sample.values)) for sample in by_num_pairs], color=BLUE, linewidth=1.0)
    inset.set_xscale("log")
    inset.set_xticks(counts, [f"{count:.0f}" for count in counts])
    inset.minorticks_off()
    inset.set_ylim(0, 1.35 * max(max(sample.values) for sample in by_num_pairs))
    inset.text(0.97, 0.93, "largest 1 by pairs", transform=inset.transAxes, ha="right", va="top", fontsize=8)
    inset.tick_params(labelsize=7)


def _draw_course(axes: Axes, rows: History, value: str, label: str, color: str, *, error: str = "") -> None:
    steps = [float(row["step"] or 0) for row in rows]
    values = [float(row[value] or math.nan) for row in rows]
    errors = [float(row.get(error) or math.nan) for row in rows]
    bars = errors if np.isfinite(errors).any() else None
    axes.errorbar(steps, values, yerr=bars, color=color, marker="o", markersize=4, linewidth=1.6,
                  elinewidth=1.0, capsize=2, label=label)  # fmt: skip
    axes.axhline(0.0, color=GRAY, linewidth=0.8)
    count_ticks(axes.xaxis)


def _is_known(row: Mapping[str, str | float | None], column: str) -> bool:
    return math.isfinite(float(row.get(column) or math.nan))


def _draw_limit(axes: Axes, rows: History, value: str) -> None:
    """Draw the limit of stability as a dashed line, on a logarithmic axis if it is far from the values."""
    known = [row for row in rows if _is_known(row, LIMIT)]
    if not known:
        return
    steps, limits, values = ([float(row[name] or math.nan) for row in known] for name in ("step", LIMIT, value))
    axes.plot(steps, limits, color=INK, linestyle=(0, (5, 3)), linewidth=1.4, marker="_", label="limit of stability")
    spread = max(map(abs, [*limits, *values])) / max(min(map(abs, [*limits, *values])), 1e-12)
    if min(values) > 0 and spread > 20:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 3, 3 * max(*limits, *values))


def _draw_column(axes: Axes, position: int, values: np.ndarray, texts: Sequence[str]) -> None:
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


def value_or_nan(estimate: Estimate | None) -> float:
    """Value of an estimate; NaN if it is not known."""
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


def _linear_below(values: np.ndarray) -> float:
    """Magnitude below which the logarithmic axis is linear: the smallest one above rounding error."""
    magnitudes = np.abs(values)
    largest = float(magnitudes.max(initial=0.0)) or 1.0
    return float(magnitudes[magnitudes > 1e-4 * largest].min(initial=largest))
