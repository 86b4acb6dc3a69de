"""Pictures, tables and files of the result of any analysis."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rm_optimizer.landscape.layers import LayerCurvature
from rm_optimizer.landscape.series import BetweenModels, Evolution
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.surface.grid import Slice, Surface, Trajectory
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_csv, write_rows, write_text
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import History, save_figure
from rm_optimizer.reporting.landscape import layers, runs, spectrum, surfaces
from rm_optimizer.reporting.run_report import plot_training_curvature, training_rows
from rm_optimizer.reporting.tables import Cell, summary_table
from rm_optimizer.schema.landscape import AnalysisType

_VIEWS: Mapping[type, tuple[Callable[[Any], list[Drawing]], Callable[[Any], dict[str, Cell]]]] = {
    Slice: (surfaces.slice_drawings, surfaces.slice_table),
    Surface: (surfaces.surface_drawings, surfaces.surface_table),
    Trajectory: (surfaces.trajectory_drawings, surfaces.trajectory_table),
    LayerCurvature: (layers.layer_drawings, layers.layer_table),
    HessianSpectrum: (spectrum.spectrum_drawings, spectrum.spectrum_table),
    Evolution: (runs.evolution_drawings, runs.evolution_table),
    BetweenModels: (runs.between_drawings, runs.between_table),
}
"""Functions that draw a result, and that give its table, by its type."""


RESULTS: Mapping[AnalysisType, type[LandscapeRecord]] = {
    **dict.fromkeys(
        (AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, AnalysisType.density), HessianSpectrum
    ),
    AnalysisType.slices: Slice,
    AnalysisType.surface: Surface,
    AnalysisType.layers: LayerCurvature,
    AnalysisType.trajectory: Trajectory,
    AnalysisType.evolution: Evolution,
    AnalysisType.between: BetweenModels,
}
"""Type of the result of each analysis."""


def drawings(result: LandscapeRecord) -> list[Drawing]:
    """Figures of a result and the numbers in them."""
    return _VIEWS[type(result)][0](result)


def summary_rows(result: LandscapeRecord) -> dict[str, Cell]:
    """Rows for `summary_table`."""
    return _VIEWS[type(result)][1](result)


def scalars_of(result: LandscapeRecord) -> dict[str, float]:
    """Scalars of a result by name, for loggers.

    Empty for grids, whose numbers are tables.
    """
    match result:
        case HessianSpectrum():
            values = {
                name: quantity.value for name, quantity in result.quantities.items() if quantity.value is not None
            }
            return spectrum.spectrum_scalars(result) | values
        case LayerCurvature():
            rows = {item.block: layers.layer_row(item) for item in result.blocks}
            cells = {f"{block}/{name}": cell for block, row in rows.items() for name, cell in row.items()}
            return {name: cell for name, cell in cells.items() if isinstance(cell, float)}
        case BetweenModels():
            return runs.between_scalars(result)
    return {}


def print_result(title: str, result: LandscapeRecord, console: Console | None = None) -> None:
    """Print the numbers of a result."""
    (console or Console()).print(summary_table(title, summary_rows(result)))


def draw_result(result: LandscapeRecord, folder: Path) -> list[Path]:
    """Draw a result as PNG and SVG.

    Its numbers are written as Parquet and CSV next to the pictures.
    """
    files = [file for drawing in drawings(result) for file in _written(drawing, folder)]
    if isinstance(result, HessianSpectrum):
        quantities = {name: json_values(quantity) for name, quantity in result.quantities.items()}
        content = json.dumps({"status": result.status, **quantities}, indent=2)
        files.append(write_text(folder / "quantities.json", content + "\n"))
    return files


def draw_training_curvature(history: History, folder: Path, caption: str) -> list[Path]:
    """Draw the top eigenvalue and the trace during training, with the numbers as Parquet and CSV."""
    figure = plot_training_curvature(history, caption=caption)
    return _written(Drawing("during_training", figure, caption, training_rows(history)), folder)


def _written(drawing: Drawing, folder: Path) -> list[Path]:
    """Write a figure as PNG and SVG.

    Its rows, if they are given, are written as Parquet and CSV.
    """
    files, stem = [], folder / drawing.name
    if drawing.figure is not None:
        files += save_figure(drawing.figure, stem.with_suffix(".png"), svg=True)
    if drawing.rows is not None:
        files += [
            write_rows(stem.with_suffix(".parquet"), drawing.rows),
            write_csv(stem.with_suffix(".csv"), drawing.rows),
        ]
    return files
