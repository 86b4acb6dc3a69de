"""Pictures, table and rows of the eigenvalues of a matrix.

They also show curvature during training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.cross_fitting import TopOfSamples
from rm_optimizer.landscape.estimates.density import SPREAD, DensityCurve, density_curve
from rm_optimizer.landscape.estimates.quantities import LocalGeometry, Quantity
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import (
    BLUE,
    INK,
    ORANGE,
    VERMILION,
    Panel,
    draw_legend,
    new_figure,
    numbers,
)
from rm_optimizer.reporting.tables import Cell

Row = dict[str, Any]
_FEW = 3
"""Number of eigenvalues up to which the inset needs extra room."""
_MOST_BELOW = 3
"""Most cross-fitted values drawn under a density."""
_SHOWN = 10
"""Number of eigenvalues that the table lists from each end."""


def places_of(num_top: int, num_bottom: int, count: int) -> list[Row]:
    """End and rank of eigenvalues in descending order.

    Each is counted from the nearer end from which its rank is known.

    Args:
        num_top: number of the first that are the largest of all.
        num_bottom: number of the last that are the smallest of all; every eigenvalue is among one of the two.
        count: number of eigenvalues.

    Example:
        >>> [f"{place['end']} {place['rank']}" for place in places_of(2, 1, 3)]
        ['largest 1', 'largest 2', 'smallest 1']
    """
    from_top = min(num_top, max(count - num_bottom, (count + 1) // 2))
    top = [{"end": "largest", "rank": index + 1} for index in range(from_top)]
    return [*top, *({"end": "smallest", "rank": count - index} for index in range(from_top, count))]


def spectrum_rows(result: HessianSpectrum) -> list[Row]:
    """One row for each eigenvalue.

    It has end and rank, residual, error bound, and the cross-fitted value.
    """
    crossed = cross_fitted(result)
    columns = zip(
        places_of(result.num_top, result.num_bottom, len(result.eigenvalues)),
        result.eigenvalues,
        result.residuals,
        result.error_bounds,
        result.converged,
        strict=True,
    )
    return [
        place
        | {"eigenvalue": value, "residual": residual, "error_bound": bound, "converged": is_done}
        | (crossed_cells(crossed[index]) if index < len(crossed) else {})
        for index, (place, value, residual, bound, is_done) in enumerate(columns)
    ]


def plot_spectrum(
    rows: Sequence[Row], *, title: str, caption: str, by_num_pairs: Sequence[TopOfSamples] = ()
) -> Figure:
    """Eigenvalues by rank, positive and negative ones in different colors, with error bars.

    Args:
        rows: the eigenvalues, descending, as from `spectrum_rows`.
        title: name of the matrix.
        caption: pairs, parameters, seed.
        by_num_pairs: largest eigenvalue of samples of the pairs, for the inset.
    """
    figure, (axes,) = new_figure(title, caption)
    heights, bars = numbers(rows, "eigenvalue"), numbers(rows, "error_bound")
    rank = np.arange(1, len(heights) + 1)
    for members, color, word in ((heights >= 0, BLUE, "positive"), (heights < 0, VERMILION, "negative")):
        if members.any():
            axes.vlines(rank[members], 0, heights[members], color=color, linewidth=1.0, alpha=0.35)
            axes.curve(
                rank[members], heights[members], f"{word}; bar: error bound", error=bars[members],
                color=color, markersize=5, linestyle="none", capsize=3,
            )  # fmt: skip
    draw_cross_fitted(axes, rank + 0.25, rows, "cross-fitted; bar: 95 % over pairs", linestyle="none", elinewidth=2.0)
    axes.guide(y=0.0)
    sizes = np.abs(heights)
    largest = float(sizes.max(initial=0.0)) or 1.0
    linear_below = float(sizes[sizes > 1e-4 * largest].min(initial=largest))  # the smallest above rounding error
    axes.set_yscale("symlog", linthresh=linear_below)
    has_inset = len(by_num_pairs) > 1
    room = 1.9 if has_inset and len(heights) <= _FEW else 0.7
    axes.set(ylabel=f"eigenvalue (log; linear below {linear_below:.2g})", xlim=(0.3, len(heights) + room))
    step = next(step for step in (1, 5, 10, 50, 100, len(rows)) if len(rows) <= 14 * step)
    places = [index for index, row in enumerate(rows) if row["rank"] == 1 or row["rank"] % step == 0]
    ticks = [index for i, index in enumerate(places) if i == 0 or index - places[i - 1] >= len(rows) / 25]
    axes.set_xticks([index + 1 for index in ticks], [str(rows[index]["rank"]) for index in ticks])
    for after, (before, row) in enumerate(pairwise(rows), start=1):
        if before["end"] != row["end"]:
            axes.guide(x=after + 0.5, linestyle=(0, (4, 3)))
    axes.set_xlabel("rank from the " + " | from the ".join(dict.fromkeys(row["end"] for row in rows)))
    crossed = known(rows, "cross_fitted_high")
    ends = [*heights, *numbers(crossed, "cross_fitted_low"), *numbers(crossed, "cross_fitted_high")]
    lowest, highest = float(min(ends)), float(max(ends))
    axes.set_ylim(2.5 * lowest if lowest < 0 else 0.0, 2.5 * highest if highest > 0 else 0.0)
    draw_legend(axes)
    if has_inset:
        _draw_by_num_pairs(axes, by_num_pairs)
    return figure


def plot_density(
    curve: DensityCurve, *, top: Sequence[float], title: str, caption: str, cross_fitted: Sequence[Estimate] = ()
) -> Figure:
    """Share of a sample's eigenvalues at each value.

    The axis is logarithmic, and the computed eigenvalues are marked.

    Args:
        curve: the density.
        top: eigenvalues that were computed one by one.
        cross_fitted: the largest of them cross-fitted, with their interval over pairs.
        title: name of the matrix.
        caption: pairs, parameters, probes, seed.
    """
    figure, (axes,) = new_figure(title, caption)
    highest = float(curve.density.max())
    floor = max(float(curve.density[curve.density > 0].min()), 1e-9 * highest)
    axes.curve(curve.grid, np.maximum(curve.density, floor / 2), "density", color=BLUE, linewidth=1.7)
    low, high = (np.maximum(curve.density + side * curve.standard_error, floor / 2) for side in (-1, 1))
    if np.isfinite(curve.standard_error).all():
        axes.fill_between(curve.grid, low, high, color=BLUE, alpha=0.25, lw=0, label="± 1 standard error over probes")
    for is_negative, color, word in ((False, VERMILION, "positive"), (True, INK, "negative")):
        if members := [value for value in top if (value < 0) == is_negative]:
            label = f"{len(members)} {word} eigenvalue{'s' * (len(members) > 1)}, computed"
            axes.curve(
                members, np.full(len(members), 2 * floor), label,
                color=color, marker="|", markersize=11, markeredgewidth=1.4, linestyle="none",
            )  # fmt: skip
    if whole := [each for each in cross_fitted[:_MOST_BELOW] if None not in (each.low, each.high)]:
        label = f"the largest {len(whole)} cross-fitted, from below; 95 % over pairs"
        for place, each in enumerate(whole):
            axes.named(5 * floor * 2.0**place, label, each, color=ORANGE, marker="D", linestyle="none")
        axes.lines[-1].set_label(label)
    axes.set_yscale("log")
    axes.set(xlabel="eigenvalue of this sample", ylabel="share of eigenvalues per unit", ylim=(floor, 3 * highest))
    draw_legend(axes, "below")
    return figure


def matrix_title(spectrum: HessianSpectrum) -> str:
    """Name of the matrix as a heading, such as `Gauss-Newton`."""
    return spectrum.matrix.replace("_", "-").capitalize().replace("newton", "Newton")


def named(source: str) -> str:
    """Checkpoint, step and pairs at the end of a caption."""
    return f"; {source}" if source else ""


def spectrum_drawings(result: HessianSpectrum) -> list[Drawing]:
    """The eigenvalues, and the density if it was estimated."""
    matrix, rows = matrix_title(result), spectrum_rows(result)
    partial = "PARTIAL, interrupted; " if result.status == SpectrumStatus.interrupted else ""
    effort = f"{result.method}, {result.num_products:,} products" if result.num_products else result.method
    caption = (
        f"{partial}n = {result.num_pairs:,} pairs; {result.num_parameters:,} {result.params} parameters; "
        f"{effort}; seed {result.seed}; loss {result.loss:.4f}{named(result.source)}"
    )
    tops = result.cross_fit.by_num_pairs if result.cross_fit else ()
    figure = plot_spectrum(rows, title=f"{matrix}: eigenvalues", caption=caption, by_num_pairs=tops)
    found = [Drawing("spectrum", figure, f"{matrix}: eigenvalues at both ends, with error bounds", rows)]
    if (density := result.density) is not None:
        curve, steps = density_curve(density), max(map(len, density.nodes), default=0)
        probes = f"{len(density.nodes)} probes of {steps} steps; {SPREAD}; {caption}"
        title = f"{matrix}: spectral density"
        figure = plot_density(curve, top=density.exact, title=title, caption=probes, cross_fitted=cross_fitted(result))
        points = zip(curve.grid.tolist(), curve.density.tolist(), curve.standard_error.tolist(), strict=True)
        rows = [{"eigenvalue": x, "density": y, "standard_error": error} for x, y, error in points]
        found.append(Drawing("density", figure, f"{matrix}: density of the eigenvalues", rows))
    return found


def cross_fitted(spectrum: HessianSpectrum) -> tuple[Estimate, ...]:
    """Available cross-fitted values of the first eigenvalues."""
    return () if spectrum.cross_fit is None else spectrum.cross_fit.values


def crossed_cells(estimate: Estimate | None) -> Row:
    """A cross-fitted value and its interval; None without one."""
    names = {"cross_fitted": "value", "cross_fitted_low": "low", "cross_fitted_high": "high"}
    return {name: None if estimate is None else getattr(estimate, part) for name, part in names.items()}


def spectrum_scalars(spectrum: HessianSpectrum) -> dict[str, float]:
    """Loss, largest eigenvalue and trace by name.

    The cross-fitted value is added; each is there as far as it was estimated.
    """
    trace, crossed = spectrum.trace, spectrum.cross_fit
    found = {"loss": spectrum.loss}
    found |= {"eigenvalue_largest": spectrum.eigenvalues[0]} if spectrum.num_top else {}
    found |= {"trace": trace.value} if trace else {}
    return found | ({"eigenvalue_cross_fitted": crossed.values[0].value} if crossed else {})


def known(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows that have a value in a column."""
    return [row for row in rows if row.get(name) is not None]


def draw_cross_fitted(
    axes: Panel, places: np.ndarray, rows: Sequence[Row], label: str | None = None, **style: Any
) -> None:
    """Draw the cross-fitted values of rows with their intervals.

    Each is at the place of its row.
    """
    whole = known(rows, "cross_fitted")
    if whole:
        has_value = [row.get("cross_fitted") is not None for row in rows]
        value, low, high = (numbers(whole, f"cross_fitted{end}") for end in ("", "_low", "_high"))
        axes.curve(places[has_value], value, label, low=low, high=high, **{"color": ORANGE, "marker": "D", **style})


def _draw_by_num_pairs(axes: Panel, by_num_pairs: Sequence[TopOfSamples]) -> None:
    """Draw an inset with the largest eigenvalue by number of pairs.

    The numbers are quarters, halves and all of the pairs.
    """
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


def spectrum_table(result: HessianSpectrum) -> dict[str, Cell]:
    """Rows for `summary_table`: eigenvalues at both ends, and the estimated quantities."""
    rows: dict[str, Cell] = {
        "matrix, method": f"{result.matrix}, {result.method}",
        "parameters": f"{result.num_parameters:,} ({result.params})",
        "pairs": result.num_pairs,
        "loss": f"{result.loss:.4f}",
        "time": f"{result.wall_seconds:.1f} s",
    }
    if result.num_products:
        rows["products"] = f"{result.num_products:,} ({result.product})"
    eigenvalues = spectrum_rows(result)
    for index, each in enumerate(eigenvalues):
        if min(index, len(eigenvalues) - 1 - index) < _SHOWN:
            text = f"{each['eigenvalue']:.5g} ± {each['error_bound']:.1g}"
            text += "" if each["converged"] else " (not converged)"
            text += f"; cross-fitted {cross_fitted(result)[index]:.3g}" if "cross_fitted" in each else ""
            rows[f"{each['end']} {each['rank']}"] = text
        elif index == _SHOWN:
            rows["…"] = f"{len(eigenvalues) - 2 * _SHOWN:,} more in the JSON"
    if result.num_overlooked is not None:
        rows["copies and close pairs"] = f"{result.num_overlooked or 'none'} found in addition to the iteration"
    if result.not_cross_fitted:
        rows["not cross-fitted"] = result.not_cross_fitted
    crossed = result.cross_fit
    if crossed is not None and crossed.population_low is not None and crossed.population_high is not None:
        rows["largest 1 of the population, 95 %"] = f"[{crossed.population_low:.3g}, {crossed.population_high:.3g}]"
        tops = (f"{fmean(sample.values):.3g} from {sample.num_pairs:.0f} pairs" for sample in crossed.by_num_pairs)
        rows["largest 1 by number of pairs"] = ", ".join(tops)
    if result.by_pair is not None:
        place = f"{eigenvalues[0]['end']} {eigenvalues[0]['rank']}"
        for group in result.by_pair.groups:
            own = f"; its own largest {group.eigenvalues[0]:.4g}" if group.eigenvalues else ""
            along = f"{group.along[0]:.4g} along the first vector, {group.share:.0%} of {place}{own}"
            rows[f"{group.column} {group.name} ({group.num_pairs:,} pairs)"] = along
        for rank, pair in enumerate(result.by_pair.heaviest, start=1):
            groups = "".join(f"; {name}" for name in pair.pair.groups.values())
            text = f"{pair.share:.1%}, curvature {pair.curvature:.3g}: {pair.pair.pair_id}{groups}"
            rows[f"pair {rank} by share of {place}"] = f"{text}; {pair.pair.prompt!r}"
    rows["trace"] = Quantity(result.trace, "not estimated").text
    if result.geometry is not None:
        rows |= _geometry_rows(result.geometry)
    lacking: dict[str | None, list[str]] = {}
    for name, quantity in result.quantities.items():
        label = name.replace("_", " ")
        if quantity.estimate is None:
            lacking.setdefault(quantity.reason, []).append(label)
        else:
            rows[label] = quantity.text
    return rows | {", ".join(names): Quantity(None, reason).text for reason, names in lacking.items()}


def _geometry_rows(found: LocalGeometry) -> dict[str, Cell]:
    def along(value: float) -> str:
        return "n/a: the gradient or its product is 0" if math.isnan(value) else f"{value:.4g}"

    return {
        "gradient norm": f"{found.gradient_norm:.4g}",
        f"SAM sharpness, radius {found.rho:g}": f"{found.sam_sharpness:.4g}",
        "curvature along the gradient": along(found.gradient_curvature),
        "cosine of gradient and its product": along(found.gradient_alignment),
    }
