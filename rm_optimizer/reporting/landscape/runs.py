"""Pictures, tables and rows of curvature along a run and between models."""

from __future__ import annotations

from matplotlib.figure import Figure

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.series import BetweenModels, Evolution
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import (
    BLUE,
    ORANGE,
    SERIES,
    VERMILION,
    count_ticks,
    draw_legend,
    new_figure,
    numbers,
)
from rm_optimizer.reporting.landscape.spectrum import (
    Row,
    cross_fitted,
    crossed_cells,
    draw_cross_fitted,
    known,
    matrix_title,
    named,
    spectrum_scalars,
)
from rm_optimizer.reporting.tables import Cell

_MOST_DRAWN = 10
"""Most of the largest eigenvalues to draw for each model."""
_MOST_RANKS = 5
"""Most of the largest eigenvalues to draw and list for each step of a run."""


def evolution_drawings(result: Evolution) -> list[Drawing]:
    """The course of the curvature."""
    return [Drawing("evolution", plot_evolution(result), "Curvature along the run", evolution_rows(result))]


def between_drawings(result: BetweenModels) -> list[Drawing]:
    """Curvature of each model, the losses between them, and their rows."""
    caption = "Curvature of models, and the loss on the way between them"
    return [
        Drawing("between", plot_between(result), caption, between_rows(result)),
        Drawing("paths", None, "Loss on the way between models", path_rows(result)),
    ]


def plot_evolution(result: Evolution) -> Figure:
    """Curvature and subspace overlap by step of a run.

    They are the largest and smallest eigenvalues, trace and overlap, with their errors.
    """
    first = result.spectra[0]
    partial = f"PARTIAL, without steps {', '.join(map(str, result.missing))}; " if result.missing else ""
    caption = (
        f"{partial}n = {first.num_pairs:,} pairs; {first.num_parameters:,} {first.params} parameters; "
        f"{first.method}; bars: error bounds{_diamonds(first)}; seed {first.seed}{named(result.source)}"
    )
    rows = evolution_rows(result)
    by_step = list({row["step"]: row for row in rows}.values())
    traces, overlaps = (known(by_step, name) for name in ("trace", "subspace_overlap"))
    names = ["eigenvalue", *["trace"] * bool(traces), *["subspace overlap"] * bool(overlaps)]
    height, ratios = 1.4 + 1.9 * len(names), (1,) * len(names)
    figure, all_axes = new_figure(f"{matrix_title(first)} along the run", caption, ratios=ratios, height=height)
    panels = dict(zip(names, all_axes, strict=True))
    axes, most = panels["eigenvalue"], max((row["rank"] for row in rows if row["end"] == "largest"), default=0)
    for end, rank in dict.fromkeys((row["end"], row["rank"]) for row in rows):
        part = [row for row in rows if (row["end"], row["rank"]) == (end, rank)]
        below = "largest 2" if most == 2 else f"largest 2 to {most}"
        label = f"{end} 1" if rank == 1 else below if rank == 2 else None
        color, alpha = VERMILION if end == "smallest" else BLUE, 1.0 if rank == 1 else 0.75 - 0.12 * rank
        steps, values, bounds = (numbers(part, name) for name in ("step", "eigenvalue", "error_bound"))
        axes.curve(steps, values, label, error=bounds, color=color, alpha=alpha)
    crossed = [row for row in known(rows, "cross_fitted") if row["rank"] == 1]
    draw_cross_fitted(axes, numbers(crossed, "step"), crossed, "largest 1, cross-fitted", color=ORANGE, linewidth=1.2)
    if traces:
        errors, label = numbers(traces, "trace_standard_error"), "trace; bar: standard error"
        panels["trace"].curve(numbers(traces, "step"), numbers(traces, "trace"), label, error=errors, color=SERIES[2])
    if overlaps:
        steps, shares = (numbers(overlaps, name) for name in ("step", "subspace_overlap"))
        axes = panels["subspace overlap"]
        axes.curve(steps, shares, "with the step before", color=SERIES[4], marker="o", markersize=4)
        axes.set_ylim(0, 1.02)
    for name, axes in panels.items():
        if name != "subspace overlap":
            axes.guide(y=0.0, linewidth=0.8)
        axes.set_ylabel(name)
        draw_legend(axes, "outside")
    all_axes[-1].set_xlabel("optimizer step")
    count_ticks(all_axes[-1].xaxis)
    return figure


def evolution_rows(result: Evolution) -> list[Row]:
    """One row for each listed eigenvalue of each step, with the step's other numbers."""
    rows: list[Row] = []
    for step, spectrum, overlap in zip(result.steps, result.spectra, result.overlaps, strict=True):
        trace, count, last = spectrum.trace, min(_MOST_RANKS, spectrum.num_top), len(spectrum.eigenvalues) - 1
        of_step: Row = {
            "loss": spectrum.loss,
            "trace": None if trace is None else trace.value,
            "trace_standard_error": None if trace is None else trace.standard_error,
            "subspace_overlap": overlap,
        }
        places = [("largest", index + 1, index) for index in range(count)]
        places += [("smallest", 1, last)] if spectrum.num_bottom and last >= count else []
        for end, rank, index in places:
            row: Row = {"step": step, "end": end, "rank": rank, "eigenvalue": spectrum.eigenvalues[index]}
            row |= {"error_bound": spectrum.error_bounds[index], "converged": spectrum.converged[index]}
            rows.append(row | crossed_cells(_crossed(spectrum, index) if end == "largest" else None) | of_step)
    return rows


def evolution_table(result: Evolution) -> dict[str, Cell]:
    """Rows for `summary_table`: the ends of the spectrum at each step."""
    first = result.spectra[0]
    rows: dict[str, Cell] = {"matrix, method": f"{first.matrix}, {first.method}", "pairs": first.num_pairs}
    for step, spectrum, overlap in zip(result.steps, result.spectra, result.overlaps, strict=True):
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
    width, rows = 0.5 / max(1, len(result.spectra)), between_rows(result)
    for index, name in enumerate(result.names[: len(result.spectra)]):
        part = [row for row in rows if row["model"] == name][:_MOST_DRAWN]
        rank = numbers(part, "rank") + index * width
        color = SERIES[index % len(SERIES)]
        upper.curve(
            rank, numbers(part, "eigenvalue"), name, error=numbers(part, "error_bound"), color=color, linewidth=1.4
        )
        draw_cross_fitted(upper, rank + 0.08, part, color=color, linestyle="none")
    shown = [point.y for point in upper.marks if point.y is not None]
    upper.set(xlabel="rank from the largest", ylabel="eigenvalue")
    if min(shown) > 0 and max(shown) > 20 * min(shown):
        upper.set_yscale("log")
    count_ticks(upper.xaxis)
    draw_legend(upper, "outside")
    for index, path in enumerate(result.paths):
        name = f"{result.names[path.first]} to {result.names[path.second]}"
        color = SERIES[index % len(SERIES)]
        lower.curve(path.positions, path.losses, name, color=color, marker="o", markersize=4)
    lower.set(xlabel="share of the straight way", ylabel="loss (nats a pair)")
    if result.paths:
        draw_legend(lower, "outside")
    return figure


def between_table(result: BetweenModels) -> dict[str, Cell]:
    """Rows for `summary_table` about several models.

    They are eigenvalues and trace of each model, barrier and overlap of each pair of models.
    """
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
    return [
        {"model": name, "rank": index + 1, "eigenvalue": spectrum.eigenvalues[index]}
        | {"error_bound": spectrum.error_bounds[index]}
        | crossed_cells(_crossed(spectrum, index))
        for name, spectrum in zip(result.names, result.spectra, strict=False)
        for index in range(spectrum.num_top)
    ]


def between_scalars(result: BetweenModels) -> dict[str, float]:
    """Numbers of models and of their pairs by name, for loggers.

    A pair of models has a barrier and an overlap.
    """
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


def _crossed(spectrum: HessianSpectrum, index: int) -> Estimate | None:
    """One of the largest eigenvalues cross-fitted; None where it is not known."""
    values = cross_fitted(spectrum)
    return values[index] if index < len(values) else None


def _value(spectrum: HessianSpectrum, index: int) -> str:
    done = "" if spectrum.converged[index] else " (not converged)"
    return f"{spectrum.eigenvalues[index]:.4g} ± {spectrum.error_bounds[index]:.1g}{done}"


def _cross_fitted(spectrum: HessianSpectrum) -> list[str]:
    """The cross-fitted largest eigenvalue, or the reason for its absence; empty without either."""
    if spectrum.cross_fit is not None:
        return [f"cross-fitted {spectrum.cross_fit.values[0]:.3g}"]
    return [f"not cross-fitted: {spectrum.not_cross_fitted}"] if spectrum.not_cross_fitted else []
