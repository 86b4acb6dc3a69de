"""Figures in one style, for color-blind readers.

Their panels keep the numbers drawn into them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from rm_optimizer.core.metrics.calibration import ReliabilityBin
from rm_optimizer.core.metrics.estimate import Estimate
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
_BAR: Mapping[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.6, "elinewidth": 1.2, "capsize": 2}
"""Style of points with error bars."""
_MOST_NAMED = 12
"""Most series that a description lists; the others are only in the table."""


History = Sequence[Mapping[str, str | float | None]]
"""Rows of `metrics.csv`: a `step` and columns whose cells may be empty."""


@dataclass(frozen=True)
class Mark:
    """A point, bar or guide of a figure.

    Args:
        series: its label in the legend, or its name on an axis of names; empty for none.
        x: position on the horizontal axis; None for a line across all of it.
        y: position on the vertical axis; None for a line across all of it or a place on an axis of names.
        low: lower end of its interval.
        high: upper end of its interval.
    """

    series: str
    x: float | None = None
    y: float | None = None
    low: float | None = None
    high: float | None = None


class Panel(Axes):
    """Axes whose own methods draw numbers and keep them in `marks`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.marks: list[Mark] = []
        super().__init__(*args, **kwargs)

    def curve(
        self,
        x: ArrayLike,
        y: ArrayLike,
        label: str | None = None,
        *,
        error: ArrayLike | None = None,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
        **style: Any,
    ) -> None:
        """Draw points or a line.

        It has error bars if the ends of intervals are given; a NaN leaves its bar out.

        Args:
            x: positions on the horizontal axis.
            y: positions on the vertical axis.
            label: name of the series in the legend; None leaves it out of the legend.
            error: errors to both sides, in place of the ends.
            low: lower ends of the intervals.
            high: upper ends of the intervals.
            style: properties of the line.
        """
        places, values = np.atleast_1d(np.asarray(x, dtype=float)), np.atleast_1d(np.asarray(y, dtype=float))
        if error is not None:
            low, high = values - np.asarray(error, dtype=float), values + np.asarray(error, dtype=float)
        if low is None or high is None:
            self.plot(places, values, label=label, **style)
            self.marks += [Mark(label or "", *point) for point in zip(places.tolist(), values.tolist(), strict=True)]
            return
        ends = np.array([low, high], dtype=float)
        bars = np.maximum([values - ends[0], ends[1] - values], 0)
        has_bars = np.isfinite(bars).any()
        self.errorbar(places, values, yerr=bars if has_bars else None, label=label, **{**_BAR, **style})
        known = [[end if math.isfinite(end) else None for end in side] for side in ends.tolist()]
        columns = zip(places.tolist(), values.tolist(), *known, strict=True)
        self.marks += [Mark(label or "", *point) for point in columns]

    def estimates(self, x: ArrayLike, found: Sequence[Estimate], label: str | None = None, **style: Any) -> None:
        """Draw estimates with their intervals (see `curve`)."""
        value, low, high = np.array([(each.value, each.low, each.high) for each in found], dtype=float).reshape(-1, 3).T
        self.curve(x, value, label, low=low, high=high, **style)

    def guide(self, label: str | None = None, *, x: float | None = None, y: float | None = None, **style: Any) -> None:
        """Draw a line across the panel at a place of one axis.

        Only a labeled line is kept.
        """
        style = {"color": GRAY, "linewidth": 1.0, **style}
        if y is not None:
            self.axhline(y, label=label, **style)
        elif x is not None:
            self.axvline(x, label=label, **style)
        if label:
            self.marks.append(Mark(label, x, y))

    def chance(self, y: float, label: str = "chance") -> None:
        """Draw the value of random guesses as a dotted line."""
        self.guide(label, y=y, linestyle=(0, (2, 2)), linewidth=1.2)

    def bars(self, x: ArrayLike, heights: ArrayLike, label: str = "", **style: Any) -> None:
        """Draw bars around positions of the horizontal axis."""
        places, counts = np.asarray(x, dtype=float), np.asarray(heights, dtype=float)
        self.bar(places, counts, label=label, **style)
        self.marks += [Mark(label, *bar) for bar in zip(places.tolist(), counts.tolist(), strict=True)]

    def named(self, place: float, name: str, found: Estimate, **style: Any) -> None:
        """Draw an estimate with its interval in the row of a name on the vertical axis."""
        if found.low is not None and found.high is not None:
            self.hlines(place, found.low, found.high, color=style.get("color"), linewidth=2.0)
        self.plot([found.value], [place], **{"marker": "o", "markersize": 6, **style})
        self.marks.append(Mark(name, found.value, None, found.low, found.high))


def new_figure(
    title: str, caption: str, *, ratios: Sequence[int] = (1,), height: float | None = None, shares_x: bool = True
) -> tuple[Figure, list[Panel]]:
    """An empty figure with title, caption and stacked panels in the common style.

    Args:
        title: title, top left.
        caption: sample size and anything needed to read it, in gray below the title; it wraps between parts that
            semicolons separate.
        ratios: height of each panel, relative to the others.
        height: height of the figure in inches; None takes a common one.
        shares_x: True if all panels have one horizontal axis.
    """
    lines = wrapped(caption)
    figure = Figure(figsize=(7.0, height or (4.2 if len(ratios) == 1 else 5.6)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(ratios), 1, sharex=shares_x, squeeze=False, height_ratios=ratios, subplot_kw={"axes_class": Panel}
    )
    panels: list[Panel] = list(grid[:, 0])
    panels[0].set_title("\n".join([title, *("" for _ in lines)]), loc="left", fontsize=12, fontweight="bold", color=INK)
    style: dict[str, Any] = {"fontsize": 9, "color": GRAY, "va": "bottom", "in_layout": False}
    place: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    panels[0].annotate("\n".join(lines), (0.0, 1.0), **place, **style)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(GRAY)
        panel.tick_params(colors=GRAY, labelcolor=INK, labelsize=9)
        panel.grid(True, color=LIGHT, linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, panels


def series_line(index: int) -> dict[str, Any]:
    """Color, dash pattern and marker of a series; repeated colors have another pattern."""
    dashes = ("-", "--", ":", "-.")[index // len(SERIES) % 4]
    return {"color": SERIES[index % len(SERIES)], "linestyle": dashes, "linewidth": 1.7, "marker": "o", "markersize": 4}


def draw_seeds(
    panel: Panel,
    seeds: Sequence[Sequence[tuple[float, float]]],
    mean: Sequence[tuple[float, float]] | np.ndarray,
    index: int,
    label: str | None,
) -> None:
    """Draw the course of each seed of an arm, and their mean.

    The seeds are pale if there are several, and the mean is strong.

    Args:
        panel: the panel.
        seeds: points of each seed.
        mean: points of the mean over seeds.
        index: position of the arm, which decides its color.
        label: name of the arm; None leaves it out of the legend.
    """
    for points in seeds if len(seeds) > 1 else ():
        x, y = np.reshape(points, (-1, 2)).T
        panel.curve(x, y, color=SERIES[index % len(SERIES)], linewidth=0.8, alpha=0.3)
    x, y = np.reshape(mean, (-1, 2)).T
    panel.curve(x, y, label, **series_line(index))


def draw_reliability_bins(axes: Panel, bins: Sequence[ReliabilityBin], perfect: str, label: str) -> None:
    """Draw the frequency in each bin of confidence with its interval.

    A line marks equal frequency and confidence.

    Args:
        axes: the panel.
        bins: the bins.
        perfect: name of the line.
        label: name of the bins.
    """
    axes.curve([0.5, 1.0], [0.5, 1.0], perfect, color=GRAY, linestyle="--", linewidth=1.2)
    confidence, frequency = [item.mean_confidence for item in bins], [item.frequency for item in bins]
    low, high = [item.frequency_low for item in bins], [item.frequency_high for item in bins]
    axes.curve(confidence, frequency, label, low=low, high=high, color=BLUE, markersize=5, capsize=3)


def draw_differences(
    title: str, caption: str, by_score: Mapping[str, Mapping[str, tuple[str, Estimate, str]]]
) -> Figure:
    """A figure with a panel of differences for each score.

    Each arm's difference has a row, colored by its verdict.

    Args:
        title: title of the figure.
        caption: caption of the figure.
        by_score: name, difference and verdict (`better`, `worse` or another) by arm, by the score's label.
    """
    num_arms = max(map(len, by_score.values()))
    height = 3.2 + 0.5 * num_arms
    figure, panels = new_figure(title, caption, ratios=(1,) * len(by_score), height=height, shares_x=False)
    for panel, (label, found) in zip(panels, by_score.items(), strict=True):
        for row, (arm, (_, difference, verdict)) in enumerate(found.items()):
            panel.named(row, arm, difference, color={"better": BLUE, "worse": VERMILION}.get(verdict, INK))
        panel.guide(x=0.0, linewidth=1.2)
        panel.set_yticks(range(num_arms), [name for name, *_ in found.values()])
        panel.set(ylim=(num_arms - 0.5, -0.5), xlabel=f"difference in {label}")
        panel.margins(x=0.15)
    return figure


def draw_legend(axes: Axes, place: str = "best") -> None:
    """Add a legend.

    Args:
        axes: the axes.
        place: place over the data as for `Axes.legend`, readable there; or `above` the data in a row, for which the
            axis grows by a quarter; `below` the axes in two columns; `outside`, to their right, where it hides no data,
            unless it leaves them too little room.
    """
    labels = axes.get_legend_handles_labels()[1]
    is_short = max(map(len, labels), default=0) <= _MOST_BESIDE
    if place == "above":
        low, high = axes.get_ylim()
        is_log = axes.get_yscale() == "log"
        axes.set_ylim(top=high * (high / low) ** 0.25 if is_log else high + 0.25 * (high - low))
        axes.legend(fontsize=9, loc="upper left", ncols=len(labels), frameon=False)
    elif place == "below":
        axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.46, -0.16), ncols=2, frameon=False)
    elif place == "outside" and is_short:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    else:
        at = "best" if place == "outside" else place
        legend = axes.legend(fontsize=9, loc=at, frameon=True, framealpha=0.85, edgecolor="none")
        legend.set_zorder(10)
        legend.set_in_layout(place != "outside")  # a long one does not move the axes


def count_ticks(axis: Axis) -> None:
    """Place ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))


def wrapped(caption: str) -> list[str]:
    """Lines of text that break between parts, and inside a part that is longer than a line."""
    lines = [""]
    for part in caption.split("; "):
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        fits = not lines[-1] or len(joined) < _CAPTION_WIDTH
        lines = [*lines[:-1], joined] if fits else [*lines[:-1], f"{lines[-1]};", part]
    return [each for line in lines for each in textwrap.wrap(line, _CAPTION_WIDTH) or [""]]


def numbers(rows: History, name: str) -> np.ndarray:
    """The numbers of a column; NaN where a cell is missing or empty."""
    cells = (row.get(name) for row in rows)
    return np.array([math.nan if cell is None or cell == "" else float(cell) for cell in cells], dtype=float)


def save_figure(figure: Figure, png: Path, *, svg: bool = False) -> list[Path]:
    """Write a figure, each file first under a temporary name.

    Equal figures give equal files.
    """
    written = [png, png.with_suffix(".svg")] if svg else [png]
    for path in written:
        with replacing(path) as temporary, matplotlib.rc_context(SVG_STYLE):
            figure.savefig(temporary, format=path.suffix[1:], dpi=DPI, metadata=_UNDATED[path.suffix])
    return written


def figure_rows(figure: Figure) -> list[dict[str, Any]]:
    """A row for each point, bar and labeled guide of a figure.

    Panels are counted from the top.
    """
    panels = (each for each in figure.axes if isinstance(each, Panel))
    return [{"panel": index, **asdict(mark)} for index, panel in enumerate(panels) for mark in panel.marks]


def described(figure: Figure) -> str:
    """Title, axes with their ranges, and the ends and extremes of each series, in words."""
    return " ".join(" ".join(sentence.split()) for axes in figure.axes for sentence in _sentences(axes))


def _sentences(axes: Axes) -> Iterator[str]:
    title, caption = axes.get_title(loc="left").strip(), axes.texts[0].get_text() if axes.texts else ""
    if title:
        yield f"{title}: {caption}." if caption else f"{title}."
    if axes.get_label() == "<colorbar>":
        yield f"Colors: {axes.get_ylabel()}, {_range(axes.get_ylim())}."
        return
    if label := axes.get_xlabel():
        yield f"Horizontal axis: {label}, {_range(axes.get_xlim())}."
    if label := axes.get_ylabel():
        yield f"Vertical axis: {label}, {_range(axes.get_ylim())}."
    marks = axes.marks if isinstance(axes, Panel) else []
    shown = [mark for mark in marks if mark.series] or [replace(mark, series="Values") for mark in marks]
    names = list(dict.fromkeys(mark.series for mark in shown))
    in_order = sorted(shown, key=lambda mark: names.index(mark.series))
    for name, own in groupby(in_order, lambda mark: mark.series):
        if name in names[:_MOST_NAMED] and (said := ", ".join(_told(list(own)))):
            yield f"{name}: {said}."
    if len(names) > _MOST_NAMED:
        yield f"{len(names) - _MOST_NAMED} more series are in the table."


def _told(marks: Sequence[Mark]) -> Iterable[str]:
    """Parts of the sentence on one series.

    They are its few points, or its number of points and their extremes.
    """
    points = [(mark.x, mark.y) for mark in marks if mark.x is not None and mark.y is not None and math.isfinite(mark.y)]
    if len(points) > 2:
        lowest, highest = (choose(points, key=lambda point: point[1]) for choose in (min, max))
        ends = {"first": points[0], "last": points[-1], "lowest": lowest, "highest": highest}
        return [f"{len(points)} points", *(f"{word} {y:.4g} at {x:.4g}" for word, (x, y) in ends.items())]
    if points:
        return [f"{y:.4g} at {x:.4g}" for x, y in points]
    alone = ((mark.x if mark.y is None else mark.y, mark) for mark in marks)
    return [
        f"{place:.4g}" + ("" if mark.low is None or mark.high is None else f", {_range((mark.low, mark.high))}")
        for place, mark in alone
        if place is not None and math.isfinite(place)
    ]


def _range(ends: tuple[float, float]) -> str:
    return f"from {ends[0]:.4g} to {ends[1]:.4g}"
