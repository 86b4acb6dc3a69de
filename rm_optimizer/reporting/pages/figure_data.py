"""Contents of a figure, read from its lines, bars and intervals, as rows of a table and as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

_MOST_NAMED = 12
"""Most series that a description lists; the others are only in the table."""


@dataclass(frozen=True)
class Mark:
    """A point, bar or interval of a figure.

    Args:
        panel: index of its axes, from the top.
        series: its label in the legend, or its name on an axis of names; empty for none.
        x: position on the horizontal axis.
        y: position on the vertical axis.
        low: lower end of an interval.
        high: upper end of an interval.
    """

    panel: int
    series: str
    x: float | None = None
    y: float | None = None
    low: float | None = None
    high: float | None = None


def figure_rows(figure: Figure) -> list[dict[str, object]]:
    """A row for each point, bar and interval of a figure."""
    return [asdict(mark) for panel, axes in enumerate(figure.axes) for mark in _marks(panel, axes)]


def described(figure: Figure) -> str:
    """Title, axes with their ranges, and the ends and extremes of each series, in words."""
    sentences = [sentence for panel, axes in enumerate(figure.axes) for sentence in _axes_sentences(panel, axes)]
    return " ".join(" ".join(sentence.split()) for sentence in sentences)


def _marks(panel: int, axes: Axes) -> Iterator[Mark]:
    labels = {id(container[0]): container.get_label() for container in axes.containers}
    for line in axes.lines:
        yield from _line_marks(panel, axes, line, _shown(labels.get(id(line), line.get_label())))
    for container in axes.containers:
        if isinstance(container, BarContainer):
            name = _shown(container.get_label()) or _shown(container[0].get_label())
            for bar in container:
                center = float(bar.get_x() + bar.get_width() / 2)
                yield Mark(panel, name, center, float(bar.get_height()))
    for collection in axes.collections:
        name = _shown(collection.get_label())
        if isinstance(collection, PathCollection):
            points = np.asarray(collection.get_offsets(), dtype=np.float64)
            yield from (Mark(panel, name, x, y) for x, y in points.tolist())
        elif isinstance(collection, LineCollection):
            for segment in collection.get_segments():
                yield from _interval(panel, axes, name, np.asarray(segment, dtype=np.float64))


def _line_marks(panel: int, axes: Axes, line: Line2D, name: str) -> Iterator[Mark]:
    is_data = line.get_transform().contains_branch_seperately(axes.transData)
    points = np.asarray(line.get_xydata(), dtype=np.float64)
    if all(is_data):
        for x, y in points.tolist():
            side, top = _name_at(axes.yaxis, y), _name_at(axes.xaxis, x)
            yield Mark(panel, name or side or top, None if top else x, None if side else y)
    elif points.size and name:
        x, y = (place if meant else None for place, meant in zip(points[0].tolist(), is_data, strict=True))
        yield Mark(panel, name, x, y)


def _interval(panel: int, axes: Axes, name: str, segment: np.ndarray) -> Iterator[Mark]:
    if segment.shape != (2, 2):
        return
    (x, y), (end_x, end_y) = segment.tolist()
    if y == end_y:
        side = _name_at(axes.yaxis, y)
        yield Mark(panel, name or side, None, None if side else y, min(x, end_x), max(x, end_x))
    elif x == end_x:
        top = _name_at(axes.xaxis, x)
        yield Mark(panel, name or top, None if top else x, None, min(y, end_y), max(y, end_y))


def _shown(label: object) -> str:
    """The label as in the legend; labels that begin with an underscore are matplotlib's own."""
    return "" if str(label).startswith("_") else str(label)


def _name_at(axis: Axis, place: float) -> str:
    """The name at a position of an axis of names; empty for an axis of numbers."""
    locator = axis.get_major_locator()
    if not isinstance(locator, FixedLocator) or place not in np.asarray(locator.tick_values(0, 0)):
        return ""
    return axis.get_major_formatter()(place)


def _axes_sentences(panel: int, axes: Axes) -> Iterator[str]:
    title, caption = axes.get_title(loc="left").strip(), axes.texts[0].get_text() if axes.texts else ""
    if title:
        yield f"{title}: {caption}." if caption else f"{title}."
    if axes.get_label() == "<colorbar>":
        yield f"Colors: {axes.get_ylabel()}, from {_number(axes.get_ylim()[0])} to {_number(axes.get_ylim()[1])}."
        return
    ends = zip(("Horizontal", "Vertical"), ("x", "y"), strict=True)
    for side, name in ends:
        label, (low, high) = getattr(axes, f"get_{name}label")(), getattr(axes, f"get_{name}lim")()
        if label:
            yield f"{side} axis: {label}, from {_number(low)} to {_number(high)}."
    series: dict[str, list[Mark]] = {}
    for mark in _marks(panel, axes):
        series.setdefault(mark.series, []).append(mark)
    named = {name: marks for name, marks in series.items() if name}
    for name, marks in list((named or series).items())[:_MOST_NAMED]:
        yield _series_sentence(name or "Values", marks)
    if len(named) > _MOST_NAMED:
        yield f"{len(named) - _MOST_NAMED} more series stand in the table."


def _series_sentence(name: str, marks: Sequence[Mark]) -> str:
    points = [(mark.x, mark.y) for mark in marks if mark.x is not None and mark.y is not None and np.isfinite(mark.y)]
    said = [f"from {_number(mark.low)} to {_number(mark.high)}" for mark in marks if mark.low is not None][:1]
    if len(points) > 2:
        lowest, highest = (choose(points, key=lambda point: point[1]) for choose in (min, max))
        ends = {"first": points[0], "last": points[-1], "lowest": lowest, "highest": highest}
        said = [f"{len(points)} points", *(f"{word} {_number(y)} at {_number(x)}" for word, (x, y) in ends.items())]
    elif points:
        said = [*(f"{_number(y)} at {_number(x)}" for x, y in points), *said]
    guides = [mark.x if mark.y is None else mark.y for mark in marks if mark.low is None and not points]
    said = [*map(_number, guides), *said]
    return f"{name}: {', '.join(said)}." if said else ""


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"
