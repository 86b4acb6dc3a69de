"""Pictures, tables and rows of curvature along a run and between models."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from rm_optimizer.landscape.between import BetweenModels
from rm_optimizer.landscape.evolution import Evolution
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.surface.results import Row
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import (
    BLUE,
    ORANGE,
    SERIES,
    VERMILION,
    Panel,
    count_ticks,
    draw_legend_beside,
    new_figure,
)
from rm_optimizer.reporting.landscape.spectrum import crossed_cells, matrix_title, named, spectrum_scalars
from rm_optimizer.reporting.tables import Cell

_MOST_DRAWN = 10
"""Most of the largest eigenvalues to draw for each model."""
_MOST_RANKS = 5
"""Most of the largest eigenvalues to draw and list for each step of a run."""


def evolution_drawings(result: Evolution) -> list[Drawing]:
    """The course of the curvature."""
    return [Drawing("evolution", plot_evolution(result), "Curvature along the run", evolution_rows(result))]


def between_drawings(result: BetweenModels) -> list[Drawing]:
    """Curvature of each model and the losses between them, and the rows of the losses."""
    caption = "Curvature of models, and the loss on the way between them"
    return [
        Drawing("between", plot_between(result), caption, between_rows(result)),
        Drawing("paths", None, "Loss on the way between models", path_rows(result)),
    ]


def plot_evolution(result: Evolution) -> Figure:
    """Largest and smallest eigenvalues, trace and subspace overlap by step of a run, with their errors."""
    first = result.spectra[0]
    partial = f"PARTIAL, without steps {', '.join(map(str, result.missing))}; " if result.missing else ""
    caption = (
        f"{partial}n = {first.num_pairs:,} pairs; {first.num_parameters:,} {first.params} parameters; "
        f"{first.method}; bars: error bounds{_diamonds(first)}; seed {first.seed}{named(result.source)}"
    )
    panels = {"eigenvalue": _draw_ends}
    if any(spectrum.trace is not None for spectrum in result.spectra):
        panels["trace"] = _draw_trace
    if any(overlap is not None for overlap in result.overlaps):
        panels["subspace overlap"] = _draw_overlap
    height, ratios = 1.4 + 1.9 * len(panels), (1,) * len(panels)
    figure, all_axes = new_figure(f"{matrix_title(first)} along the run", caption, ratios=ratios, height=height)
    for axes, (label, draw) in zip(all_axes, panels.items(), strict=True):
        draw(axes, result)
        axes.set_ylabel(label)
        draw_legend_beside(axes)
    all_axes[-1].set_xlabel("optimizer step")
    count_ticks(all_axes[-1].xaxis)
    return figure


def evolution_rows(result: Evolution) -> list[Row]:
    """One row for each listed eigenvalue of each step, with the step's other numbers."""
    rows: list[Row] = []
    for step, spectrum, overlap in _steps(result):
        trace = spectrum.trace
        of_step: Row = {
            "loss": spectrum.loss,
            "trace": None if trace is None else trace.value,
            "trace_standard_error": None if trace is None else trace.standard_error,
            "subspace_overlap": overlap,
        }
        for end, rank, index in _ranks(spectrum):
            crossed = spectrum.cross_fit.values[index : index + 1] if spectrum.cross_fit and end == "largest" else ()
            row: Row = {"step": step, "end": end, "rank": rank, "eigenvalue": spectrum.eigenvalues[index]}
            row |= {"error_bound": spectrum.error_bounds[index], "converged": spectrum.converged[index]}
            rows.append(row | crossed_cells(crossed[0] if crossed else None) | of_step)
    return rows


def evolution_table(result: Evolution) -> dict[str, Cell]:
    """Rows for `summary_table`: the ends of the spectrum at each step."""
    first = result.spectra[0]
    rows: dict[str, Cell] = {"matrix, method": f"{first.matrix}, {first.method}", "pairs": first.num_pairs}
    for step, spectrum, overlap in _steps(result):
        ends = [f"largest {_value(spectrum, 0)}"]
        if spectrum.num_bottom:
            ends.append(f"smallest {_value(spectrum, len(spectrum.eigenvalues) - 1)}")
        ends += _cross_fitted(spectrum)
        if spectrum.trace is not None:
            ends.append(f"trace {spectrum.trace.value:.4g}")
        if overlap is not None:
            ends.append(f"overlap {overlap:.2f}")
        rows[f"step {step:,}"] = ", ".join(ends)
    return rows


def plot_between(result: BetweenModels) -> Figure:
    """Largest eigenvalues of each model, and the loss between each pair of models."""
    first = result.spectra[0]
    num_paths = len(result.names) * (len(result.names) - 1) // 2
    partial = f"PARTIAL, {len(result.paths)} of {num_paths} paths; " if len(result.paths) < num_paths else ""
    caption = partial + (
        f"n = {first.num_pairs:,} pairs of {result.num_prompts:,} prompts; {first.num_parameters:,} {first.params} "
        f"parameters; {first.method}; bars: error bounds{_diamonds(first)}; seed {first.seed}{named(result.source)}"
    )
    figure, (upper, lower) = new_figure("Between models", caption, ratios=(1, 1), shares_x=False)
    width = 0.5 / max(1, len(result.spectra))
    shown: list[float] = []
    for index, spectrum in enumerate(result.spectra):
        values = spectrum.eigenvalues[: min(spectrum.num_top, _MOST_DRAWN)]
        crossed = spectrum.cross_fit.values[: len(values)] if spectrum.cross_fit else ()
        rank, color = np.arange(1, len(values) + 1) + index * width, SERIES[index % len(SERIES)]
        bounds = spectrum.error_bounds[: len(values)]
        upper.curve(rank, values, result.names[index], error=bounds, color=color, linewidth=1.4)
        upper.estimates(rank[: len(crossed)] + 0.08, crossed, color=color, marker="D", linestyle="none")
        shown += values
    upper.set(xlabel="rank from the largest", ylabel="eigenvalue")
    if min(shown) > 0 and max(shown) > 20 * min(shown):
        upper.set_yscale("log")
    count_ticks(upper.xaxis)
    draw_legend_beside(upper)
    for index, path in enumerate(result.paths):
        name = f"{result.names[path.first]} to {result.names[path.second]}"
        color = SERIES[index % len(SERIES)]
        lower.curve(path.positions, path.losses, name, color=color, marker="o", markersize=4)
    lower.set(xlabel="share of the straight way", ylabel="loss (nats a pair)")
    if result.paths:
        draw_legend_beside(lower)
    return figure


def between_table(result: BetweenModels) -> dict[str, Cell]:
    """Rows for `summary_table`: eigenvalues and trace of each model, barrier and overlap of each pair of models."""
    first = result.spectra[0]
    rows: dict[str, Cell] = {
        "matrix, method": f"{first.matrix}, {first.method}",
        "pairs / prompts": f"{first.num_pairs:,} / {result.num_prompts:,}",
    }
    for name, spectrum in zip(result.names, result.spectra, strict=False):
        top = f"largest {spectrum.eigenvalues[0]:.4g} ± {spectrum.error_bounds[0]:.1g}"
        parts = [f"loss {spectrum.loss:.4f}", top, *_cross_fitted(spectrum)]
        rows[name] = ", ".join([*parts, *([f"trace {spectrum.trace:.4g}"] if spectrum.trace else [])])
    for path, overlap in zip(result.paths, result.overlaps, strict=True):
        shared = "" if overlap is None else f", subspace overlap {overlap:.2f}"
        rows[f"{result.names[path.first]} to {result.names[path.second]}"] = f"barrier {path.barrier:.3g}{shared}"
    return rows


def between_rows(result: BetweenModels) -> list[Row]:
    """One row for each of the largest eigenvalues of each model."""
    rows: list[Row] = []
    for name, spectrum in zip(result.names, result.spectra, strict=False):
        crossed = spectrum.cross_fit.values if spectrum.cross_fit else ()
        for index in range(spectrum.num_top):
            estimate = crossed[index] if index < len(crossed) else None
            row: Row = {"model": name, "rank": index + 1, "eigenvalue": spectrum.eigenvalues[index]}
            rows.append(row | {"error_bound": spectrum.error_bounds[index]} | crossed_cells(estimate))
    return rows


def between_scalars(result: BetweenModels) -> dict[str, float]:
    """Numbers of each model, and barrier and overlap of each pair of models, by name, for loggers."""
    found: dict[str, float] = {}
    for name, spectrum in zip(result.names, result.spectra, strict=False):
        found |= {f"{name}/{key}": value for key, value in spectrum_scalars(spectrum).items()}
    for path, overlap in zip(result.paths, result.overlaps, strict=True):
        ends = f"{result.names[path.first]} to {result.names[path.second]}"
        found[f"{ends}/barrier"] = path.barrier.value
        found |= {} if overlap is None else {f"{ends}/subspace_overlap": overlap}
    return found


def path_rows(result: BetweenModels) -> list[Row]:
    """One row for each point of each path."""
    rows: list[Row] = []
    for path, overlap in zip(result.paths, result.overlaps, strict=True):
        ends: Row = {"first": result.names[path.first], "second": result.names[path.second]}
        barrier: Row = {
            "barrier": path.barrier.value,
            "barrier_low": path.barrier.low,
            "barrier_high": path.barrier.high,
        }
        for position, loss in zip(path.positions, path.losses, strict=True):
            rows.append(ends | {"position": position, "loss": loss, "subspace_overlap": overlap} | barrier)
    return rows


def _diamonds(spectrum: HessianSpectrum) -> str:
    """Part of a caption about cross-fitted values; empty without them."""
    return "; diamonds: cross-fitted, with their 95 % intervals" if spectrum.cross_fit is not None else ""


def _steps(result: Evolution) -> list[tuple[int, HessianSpectrum, float | None]]:
    return list(zip(result.steps, result.spectra, result.overlaps, strict=True))


def _ranks(spectrum: HessianSpectrum) -> list[tuple[str, int, int]]:
    """End, rank and index of the largest eigenvalues, and of the smallest one if it is known."""
    count = min(_MOST_RANKS, spectrum.num_top)
    found = [("largest", index + 1, index) for index in range(count)]
    last = len(spectrum.eigenvalues) - 1
    return [*found, ("smallest", 1, last)] if spectrum.num_bottom and last >= count else found


def _value(spectrum: HessianSpectrum, index: int) -> str:
    done = "" if spectrum.converged[index] else " (not converged)"
    return f"{spectrum.eigenvalues[index]:.4g} ± {spectrum.error_bounds[index]:.1g}{done}"


def _cross_fitted(spectrum: HessianSpectrum) -> list[str]:
    """The cross-fitted largest eigenvalue, or the reason for its absence; empty without either."""
    if spectrum.cross_fit is not None:
        return [f"cross-fitted {spectrum.cross_fit.values[0]:.3g}"]
    return [f"not cross-fitted: {spectrum.not_cross_fitted}"] if spectrum.not_cross_fitted else []


def _draw_ends(axes: Panel, result: Evolution) -> None:
    by_place: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for step, spectrum, _ in _steps(result):
        for end, rank, index in _ranks(spectrum):
            point = (step, spectrum.eigenvalues[index], spectrum.error_bounds[index])
            by_place.setdefault((end, rank), []).append(point)
    most = max((rank for end, rank in by_place if end == "largest"), default=0)
    below = "largest 2" if most == 2 else f"largest 2 to {most}"
    for (end, rank), points in by_place.items():
        color = VERMILION if end == "smallest" else BLUE
        fade = 1.0 if rank == 1 else 0.75 - 0.12 * rank
        label = f"{end} 1" if rank == 1 else below if rank == 2 else None
        steps, values, bounds = zip(*points, strict=True)
        axes.curve(steps, values, label, error=bounds, color=color, alpha=fade)
    crossed = [(step, each.cross_fit.values[0]) for step, each, _ in _steps(result) if each.cross_fit is not None]
    if crossed:
        steps, estimates = zip(*crossed, strict=True)
        axes.estimates(steps, estimates, "largest 1, cross-fitted", color=ORANGE, marker="D", linewidth=1.2)
    axes.guide(y=0.0, linewidth=0.8)


def _draw_trace(axes: Panel, result: Evolution) -> None:
    traces = [(step, trace) for step, each, _ in _steps(result) if (trace := each.trace) is not None]
    errors = [trace.standard_error or math.nan for _, trace in traces]
    values = [trace.value for _, trace in traces]
    axes.curve([step for step, _ in traces], values, "trace; bar: standard error", error=errors, color=SERIES[2])
    axes.guide(y=0.0, linewidth=0.8)


def _draw_overlap(axes: Panel, result: Evolution) -> None:
    found = {step: overlap for step, _, overlap in _steps(result) if overlap is not None}
    axes.curve([*found], [*found.values()], "with the step before", color=SERIES[4], marker="o", markersize=4)
    axes.set_ylim(0, 1.02)
