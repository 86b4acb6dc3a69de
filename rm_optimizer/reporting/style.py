"""Style of all pictures: one size, a palette for color-blind readers, and one function to save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rm_optimizer.records.files import replacing

DPI = 150
SVG_STYLE = {"svg.hashsalt": "rm-optimizer", "svg.fonttype": "none"}
"""Settings that give equal SVG for equal figures, and keep text as text."""
_UNDATED: Mapping[str, dict[str, None]] = {".png": {"Software": None}, ".svg": {"Date": None}}
"""Metadata left out of a file, so that it depends only on the figure."""
_CAPTION_WIDTH = 92
"""Most characters in a line of a caption."""
_MOST_BESIDE = 26
"""Most characters in a line of a legend that leave half of the width to the axes."""

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
"""Okabe & Ito, "Color universal design" (2008), https://jfly.uni-koeln.de/color/."""
GRAY, LIGHT, INK = "#767676", "#E3E3E3", "#222222"
SERIES = (BLUE, VERMILION, GREEN, ORANGE, "#CC79A7", "#56B4E9")
"""Colors of several series in one picture, from the same palette."""


def new_figure(title: str, caption: str, *, strip: bool = False, shares_x: bool = True) -> tuple[Figure, list[Axes]]:
    """An empty figure with title, caption and axes in the common style.

    Args:
        title: title, top left.
        caption: sample size and anything needed to read it, in gray below the title.
        strip: True for a second, low axes under the first.
        shares_x: True if both have one horizontal axis.
    """
    heights = (5, 1) if strip else (1,)
    return _empty_figure((7.0, 5.2 if strip else 4.2), heights, title, caption, shares_x=shares_x)


def _empty_figure(
    size: tuple[float, float], heights: Sequence[int], title: str, caption: str, *, shares_x: bool = True
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=shares_x, squeeze=False, height_ratios=heights)
    all_axes: list[Axes] = list(grid[:, 0])
    all_axes[0].set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    all_axes[0].text(0.0, 1.025, caption, transform=all_axes[0].transAxes, fontsize=9, color=GRAY)
    for axes in all_axes:
        style_axes(axes)
    return figure, all_axes


def style_axes(axes: Axes) -> None:
    """Style the axes with two thin spines, a light grid behind the data, and gray ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(colors=GRAY, labelcolor=INK, labelsize=9)
    axes.grid(True, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_legend(axes: Axes, location: str = "best", *, in_layout: bool = True) -> None:
    """Add a legend that is readable over data; with `in_layout=False` it does not move the axes."""
    legend = axes.legend(fontsize=9, loc=location, frameon=True, framealpha=0.85, edgecolor="none")
    legend.set_zorder(10)
    legend.set_in_layout(in_layout)


def draw_legend_above(axes: Axes) -> None:
    """Add a legend in a row above the data, and extend the axis by a quarter for it."""
    low, high = axes.get_ylim()
    is_log = axes.get_yscale() == "log"
    axes.set_ylim(top=high * (high / low) ** 0.25 if is_log else high + 0.25 * (high - low))
    axes.legend(fontsize=9, loc="upper left", ncols=len(axes.get_legend_handles_labels()[1]), frameon=False)


def draw_legend_below(axes: Axes) -> None:
    """Add a legend in two columns below the axes, where it hides no data."""
    axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.46, -0.16), ncols=2, frameon=False)


def draw_legend_beside(axes: Axes) -> None:
    """Add a legend to the right of the axes, where it hides no data, unless it leaves the axes too little room."""
    if max(map(len, axes.get_legend_handles_labels()[1]), default=0) > _MOST_BESIDE:
        draw_legend(axes, in_layout=False)
    else:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def count_ticks(axis: Axis) -> None:
    """Place ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))


def captioned_figure(
    title: str, caption: str, *, strip: bool = False, shares_x: bool = True
) -> tuple[Figure, list[Axes]]:
    """Like `new_figure`, with a caption of several parts, on two lines if one is too short."""
    lines = wrapped(caption)
    figure, axes = new_figure(title + "\n" * (len(lines) - 1), "\n".join(lines), strip=strip, shares_x=shares_x)
    axes[0].texts[0].set(va="bottom", in_layout=False)
    return figure, axes


def wrapped(caption: str) -> list[str]:
    """Lines of text that break only between parts."""
    lines = [""]
    for part in caption.split("; "):
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        fits = not lines[-1] or len(joined) < _CAPTION_WIDTH
        lines = [*lines[:-1], joined] if fits else [*lines[:-1], f"{lines[-1]};", part]
    return lines


def two_panels(
    title: str, caption: str, *, ratios: tuple[int, int], shares_x: bool = True
) -> tuple[Figure, list[Axes]]:
    """Like `new_figure` with a strip, where both axes have room for a curve."""
    figure, axes = captioned_figure(title, caption, strip=True, shares_x=shares_x)
    figure.set_size_inches(7.0, 5.6)
    grid = axes[0].get_gridspec()
    assert grid is not None, "the axes of a strip stand in a grid"
    grid.set_height_ratios(ratios)
    return figure, axes


def stacked_panels(title: str, caption: str, *, count: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with several stacked axes of equal height that share the horizontal axis.

    Args:
        title: title, top left.
        caption: anything needed to read it; parts separated by semicolons are wrapped.
        count: number of axes.
    """
    lines = wrapped(caption)
    height = 1.2 + 1.9 * count + 0.2 * len(lines)
    figure, axes = _empty_figure((7.0, height), (1,) * count, title + "\n" * (len(lines) - 1), "\n".join(lines))
    axes[0].texts[0].set(va="bottom", in_layout=False)
    return figure, axes


def save_figure(figure: Figure, png: Path, *, svg: bool = False) -> list[Path]:
    """Write a figure, each file first under a temporary name; equal figures give equal files."""
    written = [png, png.with_suffix(".svg")] if svg else [png]
    for path in written:
        with replacing(path) as temporary, matplotlib.rc_context(SVG_STYLE):
            figure.savefig(temporary, format=path.suffix[1:], dpi=DPI, metadata=_UNDATED[path.suffix])
    return written
