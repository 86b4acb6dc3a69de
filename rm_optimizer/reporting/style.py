"""How every picture looks: one size, one palette that color-blind readers can tell apart, one way to disk."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rm_optimizer.records.files import replacing

DPI = 150

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
"""Okabe & Ito, "Color universal design" (2008), https://jfly.uni-koeln.de/color/."""
GRAY, LIGHT, INK = "#767676", "#E3E3E3", "#222222"


def new_figure(title: str, caption: str, *, strip: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with the house's title, caption and axes.

    Args:
        title: what is shown, top left.
        caption: sample size and anything needed to read it, in gray below the title.
        strip: whether a second, low axes lies under the first and shares its horizontal axis.
    """
    figure = Figure(figsize=(7.0, 5.2 if strip else 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    heights = (5, 1) if strip else (1,)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    all_axes: list[Axes] = list(grid[:, 0])
    all_axes[0].set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    all_axes[0].text(0.0, 1.025, caption, transform=all_axes[0].transAxes, fontsize=9, color=GRAY)
    for axes in all_axes:
        style_axes(axes)
    return figure, all_axes


def style_axes(axes: Axes) -> None:
    """Two thin spines, a light grid behind the data, gray ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(colors=GRAY, labelcolor=INK, labelsize=9)
    axes.grid(True, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_legend(axes: Axes, location: str = "best") -> None:
    """A legend whose words stay readable over data."""
    legend = axes.legend(fontsize=9, loc=location, frameon=True, framealpha=0.85, edgecolor="none")
    legend.set_zorder(10)


def count_ticks(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG under a temporary name, then rename it."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    return path
