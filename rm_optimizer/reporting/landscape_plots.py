"""Pictures of the loss around the weights: lines, contours, surfaces and the path of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from rm_optimizer.landscape.surface.grid import PointLoss
from rm_optimizer.landscape.surface.results import GridDescription, Slice, Surface, Trajectory
from rm_optimizer.reporting.plots import CHANCE_LOSS
from rm_optimizer.reporting.style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    VERMILION,
    captioned_figure,
    draw_legend,
    two_panels,
    wrapped,
)

COLORS = (BLUE, VERMILION, GREEN, ORANGE, INK)
_CROSS: dict[str, Any] = {
    "marker": "P", "color": VERMILION, "markeredgecolor": "white", "markersize": 11, "linestyle": "none",
}  # fmt: skip
_TITLE = "Loss over a plane through the weights"
_WIDE = 30.0
"""Ratio of largest to smallest loss from which the color scale is logarithmic."""


def plot_slices(result: Slice) -> Figure:
    """Loss and accuracy along each direction, with bands of one standard error over pairs."""
    figure, (upper, lower) = two_panels("Loss along directions", _caption(result.measured, result), ratios=(2, 1))
    steps = np.array(result.steps)
    for index, (name, line) in enumerate(zip(result.measured.names, result.points, strict=True)):
        color, style = COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--"
        for axes, value in ((upper, "loss"), (lower, "accuracy")):
            values, errors = _column(line, value), _column(line, f"{value}_standard_error")
            axes.plot(steps, values, color=color, linestyle=style, linewidth=1.7, label=name)
            axes.fill_between(steps, values - errors, values + errors, color=color, alpha=0.15, linewidth=0)
    for axes, chance in ((upper, CHANCE_LOSS), (lower, 0.5)):
        axes.axhline(chance, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.1, label="chance")
        axes.axvline(0.0, color=GRAY, linewidth=0.8)
    upper.set_ylabel("loss (nats a pair)")
    lower.set(xlabel=f"step along the direction ({_unit(result.measured)})", ylabel="accuracy")
    upper.plot([], [], color=GRAY, alpha=0.3, linewidth=7, label="± 1 standard error")
    draw_legend(upper)
    return figure


def plot_contour(result: Surface) -> Figure:
    """Lines of equal loss over a plane through the weights."""
    caption = _caption(result.measured, result) + _error_of(result.points)
    figure, (axes,) = captioned_figure(_TITLE, caption)
    _draw_contour(figure, axes, result)
    axes.plot(0.0, 0.0, label="trained weights", **_CROSS)
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
    """The checkpoints of a run over lines of equal loss, in the plane that is closest to them."""
    surface = result.surface
    caption = _caption(surface.measured, result) + _error_of([result.points])
    figure, (axes,) = captioned_figure("The way training took", caption)
    _draw_contour(figure, axes, surface)
    x, y = np.array(result.coordinates).T
    axes.plot(x, y, color="white", linewidth=3.2)
    marks: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white"}
    axes.plot(x, y, color=INK, linewidth=1.4, label="checkpoints (loss ± 1 standard error)", **marks)
    axes.plot(x[-1], y[-1], label="last checkpoint", **_CROSS)
    for index in _apart(x, y, surface):
        is_right = x[index] > (surface.x[0] + surface.x[-1]) / 2
        offset = (-7 if is_right else 7, -15 if 0 < index < len(x) - 1 else 9)
        axes.annotate(
            _loss_at(result, index), (x[index], y[index]),
            offset, textcoords="offset points", ha="right" if is_right else "left", fontsize=8,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
    draw_legend(axes)
    return figure


def _apart(x: np.ndarray, y: np.ndarray, surface: Surface) -> list[int]:
    """First and last checkpoint, and the middle one if its label fits between theirs."""
    last, middle = len(x) - 1, len(x) // 2
    span = np.array([surface.x[-1] - surface.x[0], surface.y[-1] - surface.y[0]])
    places = np.column_stack([x, y]) / span
    is_free = all(float(np.abs(places[middle] - places[end]).max()) > 0.12 for end in (0, last))
    return [0, middle, last] if is_free else [0, last]


def _caption(measured: GridDescription, result: Slice | Surface | Trajectory) -> str:
    partial = f"PARTIAL, {result.num_missing} points missing; " if result.num_missing else ""
    where = "" if measured.params == "trainable" else f" of {measured.params}"
    return (
        f"{partial}{measured.method}{where}; n = {measured.num_pairs:,} pairs of {measured.num_prompts:,} prompts; "
        f"seed {measured.seed}{named(measured.source)}"
    )


def named(source: str) -> str:
    """Checkpoint, step and pairs at the end of a caption."""
    return f"; {source}" if source else ""


def _error_of(points: Sequence[Sequence[PointLoss]]) -> str:
    """Sentence about the sampling error of the losses."""
    errors = _losses(points, "loss_standard_error")
    if not np.isfinite(errors).any():
        return ""
    return f"; standard error of a loss over pairs {np.nanmin(errors):.2g} to {np.nanmax(errors):.2g}"


def _unit(measured: GridDescription) -> str:
    """Unit of a step: a filter-normalized direction is as long as the weights, other directions have unit length."""
    return "parameter distance" if measured.values else "1 = length of the weights"


def _column(points: Sequence[PointLoss], name: str) -> np.ndarray:
    return np.array([getattr(point, name) for point in points], dtype=np.float64)


def _losses(points: Sequence[Sequence[PointLoss]], name: str = "loss") -> np.ndarray:
    values = np.array([_column(line, name) for line in points])
    return np.where(np.isfinite(values), values, np.nan)


def _norm(loss: np.ndarray) -> Normalize:
    low, high = (float(np.nanmin(loss)), float(np.nanmax(loss))) if np.isfinite(loss).any() else (0.0, 1.0)
    return LogNorm(low, high) if low > 0 and high > _WIDE * low else Normalize(low, high)


def _draw_contour(figure: Figure, axes: Axes, surface: Surface) -> None:
    loss = _losses(surface.points)
    norm = _norm(loss)
    spaced = np.geomspace if isinstance(norm, LogNorm) else np.linspace
    low, high = float(norm.vmin or 0.0), float(norm.vmax or 1.0)
    levels = spaced(low, max(high, low + 1e-9), 15)
    shown = np.ma.masked_invalid(loss)
    filled = axes.contourf(surface.x, surface.y, shown, levels=levels, norm=norm, cmap="viridis")
    lines = axes.contour(surface.x, surface.y, shown, levels=levels[1:-1:2], colors="white", linewidths=0.7)
    axes.clabel(lines, fontsize=7, fmt="%.3g")
    for text in lines.labelTexts:
        if not _is_inside(text.get_position(), surface):
            text.set_visible(False)
    bar = figure.colorbar(filled, ax=axes, label="loss (nats a pair)", format="%.3g")
    bar.ax.tick_params(labelsize=8)
    axes.grid(False)
    x, y = (f"{name} ({_unit(surface.measured)})" for name in surface.measured.names[:2])
    axes.set(xlabel=x, ylabel=y)


def _is_inside(position: tuple[float, float], surface: Surface) -> bool:
    """True if a text centered there fits within the border."""
    shares = [
        (value - ends[0]) / (ends[-1] - ends[0]) for value, ends in zip(position, (surface.x, surface.y), strict=True)
    ]
    return all(0.06 < share < 0.94 for share in shares)


def _loss_at(result: Trajectory, index: int) -> str:
    point, step = result.points[index], f"step {result.steps[index]:,}"
    return step if math.isnan(point.loss) else f"{step}: {point.loss:.3f} ± {point.loss_standard_error:.2g}"
