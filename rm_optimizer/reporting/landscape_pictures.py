"""Pictures, tables and tabular data from the result of an analysis."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.between import BetweenModels
from rm_optimizer.landscape.estimates.by_pair import CurvatureByPair
from rm_optimizer.landscape.estimates.density import SPREAD, SpectralDensity, density_curve
from rm_optimizer.landscape.estimates.sharpness import LocalGeometry
from rm_optimizer.landscape.evolution import Evolution
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature
from rm_optimizer.landscape.quantities import Quantity, summarize
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.surface.results import Row, Slice, Surface, Trajectory
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_csv, write_rows, write_text
from rm_optimizer.reporting.curvature_plots import (
    Place,
    places_of,
    plot_density,
    plot_layers,
    plot_spectrum,
    plot_training_curvature,
)
from rm_optimizer.reporting.landscape_plots import named, plot_contour, plot_slices, plot_surface, plot_trajectory
from rm_optimizer.reporting.plots import History
from rm_optimizer.reporting.run_curvature_plots import (
    between_rows,
    between_scalars,
    between_table,
    evolution_rows,
    evolution_table,
    path_rows,
    plot_between,
    plot_evolution,
    spectrum_scalars,
)
from rm_optimizer.reporting.style import save_figure
from rm_optimizer.reporting.tables import Cell, summary_table

LandscapeResult = Slice | Surface | Trajectory | LayerCurvature | HessianSpectrum | Evolution | BetweenModels
_SHOWN = 10
"""Number of eigenvalues that the table lists from each end."""


@dataclass(frozen=True)
class Drawing:
    """A figure of a result with its numbers, or only numbers, under the name of their files.

    Args:
        name: stem of the files.
        caption: contents in one sentence.
        rows: the numbers; None where another drawing of the result holds them.
        figure: the picture.
    """

    name: str
    caption: str
    rows: Sequence[Row] | None = None
    figure: Figure | None = None


def drawings(result: LandscapeResult) -> list[Drawing]:
    """Figures of a result and the numbers in them."""
    match result:
        case Slice():
            caption = "Loss and accuracy along directions through the weights"
            return [Drawing("slices", caption, [*result.rows()], plot_slices(result))]
        case Surface():
            return _surface(result)
        case Trajectory():
            caption = "Checkpoints of the run over lines of equal loss"
            way = Drawing("trajectory", caption, [*result.rows()], plot_trajectory(result))
            return [way, *_surface(result.surface)]
        case HessianSpectrum():
            return _spectrum(result)
        case LayerCurvature():
            rows = [*map(_layer_row, result.blocks)]
            return [Drawing("layers", "Curvature of each layer's block", rows, plot_layers(result))]
        case Evolution():
            return [Drawing("evolution", "Curvature along the run", evolution_rows(result), plot_evolution(result))]
        case BetweenModels():
            caption = "Curvature of models, and the loss on the way between them"
            return [
                Drawing("between", caption, between_rows(result), plot_between(result)),
                Drawing("paths", "Loss on the way between models", path_rows(result)),
            ]


def draw_result(result: LandscapeResult, folder: Path) -> list[Path]:
    """Draw a result as PNG and SVG, and write its numbers as Parquet and CSV beside the pictures."""
    files = [file for drawing in drawings(result) for file in _written(drawing, folder)]
    if isinstance(result, HessianSpectrum):
        quantities = {name: json_values(quantity) for name, quantity in summarize(result).items()}
        content = json.dumps({"status": result.status, **quantities}, indent=2)
        files.append(write_text(folder / "quantities.json", content + "\n"))
    return files


def scalars_of(result: LandscapeResult) -> dict[str, float]:
    """Scalars of a result by name, for loggers; empty for grids, whose numbers are tables."""
    match result:
        case HessianSpectrum():
            values = {name: quantity.value for name, quantity in summarize(result).items()}
            return spectrum_scalars(result) | {name: value for name, value in values.items() if value is not None}
        case LayerCurvature():
            cells = {f"{item.block}/{name}": cell for item in result.blocks for name, cell in _layer_row(item).items()}
            return {name: cell for name, cell in cells.items() if isinstance(cell, float)}
        case BetweenModels():
            return between_scalars(result)
    return {}


def draw_training_curvature(history: History, folder: Path, caption: str) -> list[Path]:
    """Draw the top eigenvalue and the trace during training, with the numbers as Parquet and CSV."""
    rows: list[Row] = []
    for row in history:
        if values := {name: float(cell) for name, cell in row.items() if name.startswith("curvature_") and cell}:
            rows.append({"step": int(row["step"] or 0), **values})
    return _written(
        Drawing("during_training", caption, rows, plot_training_curvature(history, caption=caption)), folder
    )


def print_result(title: str, result: LandscapeResult, console: Console | None = None) -> None:
    """Print the numbers of a result."""
    (console or Console()).print(summary_table(title, summary_rows(result)))


def summary_rows(result: LandscapeResult) -> dict[str, Cell]:
    """Rows for `summary_table`."""
    match result:
        case Slice():
            return _slice_rows(result)
        case Surface():
            return _surface_rows(result)
        case Trajectory():
            return _trajectory_rows(result)
        case HessianSpectrum():
            return _spectrum_rows(result)
        case LayerCurvature():
            return _sizes(result) | {item.block: _block(item) for item in result.blocks}
        case Evolution():
            return evolution_table(result)
        case BetweenModels():
            return between_table(result)


def _written(drawing: Drawing, folder: Path) -> list[Path]:
    """Write a figure as PNG and SVG, and the numbers in it as Parquet and CSV."""
    files, stem = [], folder / drawing.name
    if drawing.figure is not None:
        files += save_figure(drawing.figure, stem.with_suffix(".png"), svg=True)
    if drawing.rows is not None:
        files += [
            write_rows(stem.with_suffix(".parquet"), drawing.rows),
            write_csv(stem.with_suffix(".csv"), drawing.rows),
        ]
    return files


def _surface(result: Surface) -> list[Drawing]:
    return [
        Drawing("contour", "Lines of equal loss over a plane through the weights", figure=plot_contour(result)),
        Drawing("surface", "Loss over a plane through the weights", [*result.rows()], plot_surface(result)),
    ]


def _spectrum(result: HessianSpectrum) -> list[Drawing]:
    matrix = result.matrix.replace("_", "-").capitalize().replace("newton", "Newton")
    partial = "PARTIAL, interrupted; " if result.status == SpectrumStatus.interrupted else ""
    effort = f"{result.method}, {result.num_products:,} products" if result.num_products else result.method
    caption = (
        f"{partial}n = {result.num_pairs:,} pairs; {result.num_parameters:,} {result.params} parameters; "
        f"{effort}; seed {result.seed}; loss {result.loss:.4f}{named(result.source)}"
    )
    values, bounds, places = result.eigenvalues, result.error_bounds, _places(result)
    title = f"{matrix}: eigenvalues"
    crossed = _cross_fitted(result)
    tops = result.cross_fit.by_num_pairs if result.cross_fit else ()
    figure = plot_spectrum(
        values, bounds, title=title, caption=caption, places=places, cross_fitted=crossed, by_num_pairs=tops
    )
    columns = zip(places, values, result.residuals, bounds, result.converged, strict=True)
    rows: list[Row] = [
        {**vars(place), "eigenvalue": value, "residual": residual, "error_bound": bound, "converged": done}
        for place, value, residual, bound, done in columns
    ]
    for row, estimate in zip(rows, crossed, strict=False):
        row |= {"cross_fitted": estimate.value, "cross_fitted_low": estimate.low, "cross_fitted_high": estimate.high}
    found = [Drawing("spectrum", f"{matrix}: eigenvalues at both ends, with error bounds", rows, figure)]
    if result.density is not None:
        found.append(_density(result.density, matrix, caption, crossed))
    return found


def _density(density: SpectralDensity, matrix: str, caption: str, crossed: Sequence[Estimate]) -> Drawing:
    curve = density_curve(density)
    steps = max(map(len, density.nodes), default=0)
    probes = f"{len(density.nodes)} probes of {steps} steps, {SPREAD}; {caption}"
    title = f"{matrix}: spectral density"
    figure = plot_density(curve, top=density.exact, title=title, caption=probes, cross_fitted=crossed)
    points = zip(curve.grid.tolist(), curve.density.tolist(), curve.standard_error.tolist(), strict=True)
    rows: list[Row] = [{"eigenvalue": x, "density": y, "standard_error": error} for x, y, error in points]
    return Drawing("density", f"{matrix}: density of the eigenvalues", rows, figure)


def _origin_rows(found: CurvatureByPair, first: Place) -> dict[str, Cell]:
    """Shares of the groups and of the pairs with the largest shares in the first listed eigenvalue, named `first`."""
    place = f"{first.end} {first.rank}"
    rows: dict[str, Cell] = {}
    for group in found.groups:
        own = f"; its own largest {group.eigenvalues[0]:.4g}" if group.eigenvalues else ""
        along = f"{group.along[0]:.4g} along the first vector, {group.share:.0%} of {place}{own}"
        rows[f"{group.column} {group.name} ({group.num_pairs:,} pairs)"] = along
    for rank, each in enumerate(found.heaviest, start=1):
        groups = "".join(f"; {name}" for name in each.pair.groups.values())
        text = f"{each.share:.1%}, curvature {each.curvature:.3g}: {each.pair.pair_id}{groups}; {each.pair.prompt!r}"
        rows[f"pair {rank} by share of {place}"] = text
    return rows


def _places(result: HessianSpectrum) -> tuple[Place, ...]:
    return places_of(result.num_top, result.num_bottom, len(result.eigenvalues))


def _spectrum_rows(result: HessianSpectrum) -> dict[str, Cell]:
    rows: dict[str, Cell] = {
        "matrix, method": f"{result.matrix}, {result.method}",
        "parameters": f"{result.num_parameters:,} ({result.params})",
        "pairs": result.num_pairs,
        "loss": f"{result.loss:.4f}",
        "time": f"{result.wall_seconds:.1f} s",
    }
    if result.num_products:
        rows["products"] = f"{result.num_products:,} ({result.product})"
    for index, (place, value) in enumerate(zip(_places(result), result.eigenvalues, strict=True)):
        if min(index, len(result.eigenvalues) - 1 - index) < _SHOWN:
            rows[f"{place.end} {place.rank}"] = _eigenvalue(result, index, value)
        elif index == _SHOWN:
            rows["…"] = f"{len(result.eigenvalues) - 2 * _SHOWN:,} more in the JSON"
    if result.num_overlooked is not None:
        rows["copies and close pairs"] = f"{result.num_overlooked or 'none'} found beside the iteration"
    if result.not_cross_fitted:
        rows["not cross-fitted"] = result.not_cross_fitted
    rows |= _population_rows(result)
    if result.by_pair is not None:
        rows |= _origin_rows(result.by_pair, _places(result)[0])
    rows["trace"] = _quantity(Quantity(result.trace, "not estimated"))
    if result.geometry is not None:
        rows |= _geometry_rows(result.geometry)
    return rows | _summary_rows(result)


def _summary_rows(result: HessianSpectrum) -> dict[str, Cell]:
    """The estimated quantities, then the others, with one row for each reason."""
    rows: dict[str, Cell] = {}
    lacking: dict[str | None, list[str]] = {}
    for name, quantity in summarize(result).items():
        label = name.replace("_", " ")
        if quantity.estimate is None:
            lacking.setdefault(quantity.reason, []).append(label)
        else:
            rows[label] = _quantity(quantity)
    return rows | {", ".join(names): _quantity(Quantity(None, reason)) for reason, names in lacking.items()}


def _geometry_rows(found: LocalGeometry) -> dict[str, Cell]:
    def along(value: float) -> str:
        return "n/a: the gradient or its product is 0" if math.isnan(value) else f"{value:.4g}"

    return {
        "gradient norm": f"{found.gradient_norm:.4g}",
        f"SAM sharpness, radius {found.rho:g}": f"{found.sam_sharpness:.4g}",
        "curvature along the gradient": along(found.gradient_curvature),
        "cosine of gradient and its product": along(found.gradient_alignment),
    }


def _quantity(quantity: Quantity) -> str:
    """A number with its error, or without it if it is below the digits shown, or the reason for its absence."""
    estimate = quantity.estimate
    if estimate is None:
        return f"n/a: {quantity.reason}"
    note = f" ({quantity.note})" if quantity.note else ""
    if estimate.low is not None and estimate.high is None:
        return f"> {estimate.low:.4g}{note}"
    ends = {f"{end:.4g}" for end in (estimate.low, estimate.high) if end is not None}
    is_known = estimate.standard_error == 0 or ends == {f"{estimate.value:.4g}"}
    return (f"{estimate.value:.4g}" if is_known else f"{estimate:.4g}") + note


def _eigenvalue(result: HessianSpectrum, index: int, value: float) -> str:
    text = f"{value:.5g} ± {result.error_bounds[index]:.1g}" + ("" if result.converged[index] else " (not converged)")
    crossed = _cross_fitted(result)
    return f"{text}; cross-fitted {crossed[index]:.3g}" if index < len(crossed) else text


def _cross_fitted(result: HessianSpectrum) -> tuple[Estimate, ...]:
    """Available cross-fitted values of the first eigenvalues."""
    return () if result.cross_fit is None else result.cross_fit.values


def _population_rows(result: HessianSpectrum) -> dict[str, Cell]:
    """Interval of the population's largest eigenvalue, and the largest eigenvalue by number of sampled pairs."""
    crossed = result.cross_fit
    if crossed is None or crossed.population_low is None or crossed.population_high is None:
        return {}
    tops = [f"{fmean(sample.values):.3g} from {sample.num_pairs:.0f} pairs" for sample in crossed.by_num_pairs]
    return {
        "largest 1 of the population, 95 %": f"[{crossed.population_low:.3g}, {crossed.population_high:.3g}]",
        "largest 1 by number of pairs": ", ".join(tops),
    }


def _sizes(result: Slice | Surface | LayerCurvature) -> dict[str, Cell]:
    counted = result if isinstance(result, LayerCurvature) else result.measured
    return {"pairs / prompts": f"{counted.num_pairs:,} / {counted.num_prompts:,}", "seed": str(counted.seed)}


def _slice_rows(result: Slice) -> dict[str, Cell]:
    middle = len(result.steps) // 2
    rows: dict[str, Cell] = {"directions": result.measured.method, **_sizes(result)}
    center = result.points[0][middle]
    rows["loss at the weights"] = f"{center.loss:.4f} ± {center.loss_standard_error:.4f}"
    for name, line in zip(result.measured.names, result.points, strict=True):
        ends = f"{line[0].loss:.3f} and {line[-1].loss:.3f}"
        rows[f"{name}: loss at ±{result.steps[-1]:.3g}"] = ends
    return rows


def _surface_rows(result: Surface) -> dict[str, Cell]:
    losses = [point.loss for row in result.points for point in row if point.loss == point.loss]
    rows: dict[str, Cell] = {"directions": result.measured.method, **_sizes(result)}
    rows["lowest and highest loss"] = f"{min(losses):.4f} and {max(losses):.4f}" if losses else None
    rows["points"] = f"{len(losses):,} of {len(result.x) * len(result.y):,}"
    return rows


def _trajectory_rows(result: Trajectory) -> dict[str, Cell]:
    rows: dict[str, Cell] = {**_surface_rows(result.surface), "checkpoints": len(result.steps)}
    shares = result.surface.measured.values or ()
    parts = ", ".join(f"{share:.1%}" for share in shares)
    rows["share of the squared way in the plane"] = f"{sum(shares):.1%} ({parts})"
    for step, point, off in zip(result.steps, result.points, result.off_plane, strict=True):
        rows[f"step {step:,}: loss, distance from the plane"] = f"{point.loss:.4f}, {off:.3g}"
    return rows


def _block(item: BlockCurvature) -> str:
    crossed = f"cross-fitted {item.crossed.value:.3g}" if item.crossed else "not cross-fitted: too few prompts"
    largest = f"Gauss-Newton {item.gauss_newton[0]:.4g} ({crossed}), "
    traces = f"traces {item.gauss_newton_trace.value:.3g} and {item.trace.value:.3g} of the Hessian"
    top, half = item.hessian_top, item.hessian_crossed
    held = f" (cross-fitted {half.value:.3g})" if half else ""
    return largest + traces + (f", its largest {top.value:.4g} ± {top.error_bound:.1g}{held}" if top else "")


def _layer_row(item: BlockCurvature) -> Row:
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
