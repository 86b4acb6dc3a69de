"""Pictures and tables of the loss around the weights.

They are lines, contours, surfaces and the path of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from rm_optimizer.landscape.layers import LayerCurvature
from rm_optimizer.landscape.surface.grid import GridDescription, PointLoss, Slice, Surface, Trajectory
from rm_optimizer.reporting.document import Drawing
from rm_optimizer.reporting.figures import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    VERMILION,
    Panel,
    draw_legend,
    new_figure,
    wrapped,
)
from rm_optimizer.reporting.landscape.spectrum import named
from rm_optimizer.reporting.run_report import CHANCE_LOSS
from rm_optimizer.reporting.tables import Cell

COLORS = (BLUE, VERMILION, GREEN, ORANGE, INK)
_CROSS: dict[str, Any] = {
    "marker": "P", "color": VERMILION, "markeredgecolor": "white", "markersize": 11, "linestyle": "none",
}  # fmt: skip
_TITLE = "Loss over a plane through the weights"
_WIDE = 30.0
"""Ratio of largest to smallest loss from which the color scale is logarithmic."""


def plot_slices(result: Slice) -> Figure:
    """Loss and accuracy along each direction, with bands of one standard error over pairs."""
    figure, (upper, lower) = new_figure("Loss along directions", _caption(result.measured, result), ratios=(2, 1))
    steps = np.array(result.steps)
    for index, (name, line) in enumerate(zip(result.measured.names, result.points, strict=True)):
        color, style = COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--"
        for axes, value in ((upper, "loss"), (lower, "accuracy")):
            values, errors = _column(line, value), _column(line, f"{value}_standard_error")
            axes.curve(steps, values, name, color=color, linestyle=style, linewidth=1.7)
            axes.fill_between(steps, values - errors, values + errors, color=color, alpha=0.15, linewidth=0)
    for axes, chance in ((upper, CHANCE_LOSS), (lower, 0.5)):
        axes.chance(chance)
        axes.guide(x=0.0, linewidth=0.8)
    upper.set_ylabel("loss (nats a pair)")
    lower.set(xlabel=f"step along the direction ({_unit(result.measured)})", ylabel="accuracy")
    upper.plot([], [], color=GRAY, alpha=0.3, linewidth=7, label="± 1 standard error")
    draw_legend(upper)
    return figure


def plot_contour(result: Surface) -> Figure:
    """Lines of equal loss over a plane through the weights."""
    caption = _caption(result.measured, result) + _error_of(result.points)
    figure, (axes,) = new_figure(_TITLE, caption)
    _draw_contour(figure, axes, result)
    axes.curve(0.0, 0.0, "trained weights", **_CROSS)
    draw_legend(axes, "upper right")
    return figure


def plot_surface(result: Surface) -> Figure:
    """The same plane in three dimensions."""
    figure = Figure(figsize=(7.0, 5.6))
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0.0, 0.04, 0.94, 0.86), projection="3d")
    figure.text(0.03, 0.95, _TITLE, fontsize=12, fontweight="bold", color=INK)
    caption = wrapped(f"{_caption(result.measured, result)}{_error_of(result.points)}; axes: {_unit(result.measured)}")
    figure.text(0.03, 0.94, "\n".join(caption), fontsize=9, color=GRAY, va="top")
    x, y = np.meshgrid(result.x, result.y)
    loss = _losses(result.points)
    axes.plot_surface(x, y, loss, cmap="viridis", rcount=60, ccount=60, linewidth=0.2, edgecolor=(1, 1, 1, 0.35))
    axes.set(xlabel=result.measured.names[0], ylabel=result.measured.names[1], zlabel="loss (nats a pair)")
    axes.set_box_aspect((1.25, 1.25, 0.8))
    axes.tick_params(labelsize=8, labelcolor=INK)
    axes.locator_params(nbins=5)
    axes.view_init(elev=32, azim=-55)
    return figure


def plot_trajectory(result: Trajectory) -> Figure:
    """The checkpoints of a run over lines of equal loss.

    The plane is the closest one to them.
    """
    surface = result.surface
    caption = _caption(surface.measured, result) + _error_of([result.points])
    figure, (axes,) = new_figure("The way training took", caption)
    _draw_contour(figure, axes, surface)
    x, y = np.array(result.coordinates).T
    axes.plot(x, y, color="white", linewidth=3.2)
    marks: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white"}
    axes.curve(x, y, "checkpoints (loss ± 1 standard error)", color=INK, linewidth=1.4, **marks)
    axes.curve(x[-1], y[-1], "last checkpoint", **_CROSS)
    # first and last checkpoint, and the middle one if its label fits between theirs
    last, middle = len(x) - 1, len(x) // 2
    places = np.column_stack([x, y]) / (surface.x[-1] - surface.x[0], surface.y[-1] - surface.y[0])
    is_free = all(float(np.abs(places[middle] - places[end]).max()) > 0.12 for end in (0, last))
    for index in [0, middle, last] if is_free else [0, last]:
        is_right = x[index] > (surface.x[0] + surface.x[-1]) / 2
        offset = (-7 if is_right else 7, -15 if 0 < index < len(x) - 1 else 9)
        point, step = result.points[index], f"step {result.steps[index]:,}"
        loss = "" if math.isnan(point.loss) else f": {point.loss:.3f} ± {point.loss_standard_error:.2g}"
        axes.annotate(
            f"{step}{loss}", (x[index], y[index]),
            offset, textcoords="offset points", ha="right" if is_right else "left", fontsize=8,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
    draw_legend(axes)
    return figure


def _caption(measured: GridDescription, result: Slice | Surface | Trajectory) -> str:
    partial = f"PARTIAL, {result.num_missing} points missing; " if result.num_missing else ""
    where = "" if measured.params == "trainable" else f" of {measured.params}"
    return (
        f"{partial}{measured.method}{where}; n = {measured.num_pairs:,} pairs of {measured.num_prompts:,} prompts; "
        f"seed {measured.seed}{named(measured.source)}"
    )


def _error_of(points: Sequence[Sequence[PointLoss]]) -> str:
    """Sentence about the sampling error of the losses."""
    errors = _losses(points, "loss_standard_error")
    if not np.isfinite(errors).any():
        return ""
    return f"; standard error of a loss over pairs {np.nanmin(errors):.2g} to {np.nanmax(errors):.2g}"


def _unit(measured: GridDescription) -> str:
    """Unit of a step.

    A filter-normalized direction is as long as the weights, other directions have unit length.
    """
    return "parameter distance" if measured.values else "1 = length of the weights"


def _column(points: Sequence[PointLoss], name: str) -> np.ndarray:
    return np.array([getattr(point, name) for point in points], dtype=np.float64)


def _losses(points: Sequence[Sequence[PointLoss]], name: str = "loss") -> np.ndarray:
    values = np.array([_column(line, name) for line in points])
    return np.where(np.isfinite(values), values, np.nan)


def _draw_contour(figure: Figure, axes: Panel, surface: Surface) -> None:
    loss = _losses(surface.points)
    low, high = (float(np.nanmin(loss)), float(np.nanmax(loss))) if np.isfinite(loss).any() else (0.0, 1.0)
    is_log = low > 0 and high > _WIDE * low
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    levels = (np.geomspace if is_log else np.linspace)(low, max(high, low + 1e-9), 15)
    shown = np.ma.masked_invalid(loss)
    filled = axes.contourf(surface.x, surface.y, shown, levels=levels, norm=norm, cmap="viridis")
    lines = axes.contour(surface.x, surface.y, shown, levels=levels[1:-1:2], colors="white", linewidths=0.7)
    axes.clabel(lines, fontsize=7, fmt="%.3g")
    for text in lines.labelTexts:  # hidden where a text centered there crosses the border
        places = zip(text.get_position(), (surface.x, surface.y), strict=True)
        shares = [(value - ends[0]) / (ends[-1] - ends[0]) for value, ends in places]
        text.set_visible(all(0.06 < share < 0.94 for share in shares))
    bar = figure.colorbar(filled, ax=axes, label="loss (nats a pair)", format="%.3g")
    bar.ax.tick_params(labelsize=8)
    axes.grid(False)
    x, y = (f"{name} ({_unit(surface.measured)})" for name in surface.measured.names[:2])
    axes.set(xlabel=x, ylabel=y)


def slice_drawings(result: Slice) -> list[Drawing]:
    """Loss and accuracy along each direction."""
    caption = "Loss and accuracy along directions through the weights"
    return [Drawing("slices", plot_slices(result), caption, [*result.rows()])]


def surface_drawings(result: Surface) -> list[Drawing]:
    """Loss over a plane, as lines and in three dimensions."""
    return [
        Drawing("contour", plot_contour(result), "Lines of equal loss over a plane through the weights"),
        Drawing("surface", plot_surface(result), "Loss over a plane through the weights", [*result.rows()]),
    ]


def trajectory_drawings(result: Trajectory) -> list[Drawing]:
    """The way of training, and the plane it is drawn in."""
    caption = "Checkpoints of the run over lines of equal loss"
    way = Drawing("trajectory", plot_trajectory(result), caption, [*result.rows()])
    return [way, *surface_drawings(result.surface)]


def slice_table(result: Slice) -> dict[str, Cell]:
    """Rows for `summary_table` about slices.

    They are the loss at the weights and at the ends of each direction.
    """
    middle = len(result.steps) // 2
    rows: dict[str, Cell] = {"directions": result.measured.method, **sizes(result.measured)}
    center = result.points[0][middle]
    rows["loss at the weights"] = f"{center.loss:.4f} ± {center.loss_standard_error:.4f}"
    for name, line in zip(result.measured.names, result.points, strict=True):
        ends = f"{line[0].loss:.3f} and {line[-1].loss:.3f}"
        rows[f"{name}: loss at ±{result.steps[-1]:.3g}"] = ends
    return rows


def surface_table(result: Surface) -> dict[str, Cell]:
    """Rows for `summary_table`: range of the loss, and number of points."""
    losses = [point.loss for row in result.points for point in row if point.loss == point.loss]
    rows: dict[str, Cell] = {"directions": result.measured.method, **sizes(result.measured)}
    rows["lowest and highest loss"] = f"{min(losses):.4f} and {max(losses):.4f}" if losses else None
    rows["points"] = f"{len(losses):,} of {len(result.x) * len(result.y):,}"
    return rows


def trajectory_table(result: Trajectory) -> dict[str, Cell]:
    """Rows for `summary_table`: the plane, and the loss of each checkpoint."""
    rows: dict[str, Cell] = {**surface_table(result.surface), "checkpoints": len(result.steps)}
    shares = result.surface.measured.values or ()
    parts = ", ".join(f"{share:.1%}" for share in shares)
    rows["share of the squared way in the plane"] = f"{sum(shares):.1%} ({parts})"
    for step, point, off in zip(result.steps, result.points, result.off_plane, strict=True):
        rows[f"step {step:,}: loss, distance from the plane"] = f"{point.loss:.4f}, {off:.3g}"
    return rows


def sizes(counted: GridDescription | LayerCurvature) -> dict[str, Cell]:
    """Rows for `summary_table`: numbers of pairs and prompts, and the seed."""
    return {"pairs / prompts": f"{counted.num_pairs:,} / {counted.num_prompts:,}", "seed": str(counted.seed)}
