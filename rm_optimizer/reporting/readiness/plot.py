"""Picture of a readiness report."""

from __future__ import annotations

from matplotlib.figure import Figure

from rm_optimizer.reporting.readiness.rows import ReadinessRow, chance_of, is_share, readiness_rows
from rm_optimizer.reporting.style import BLUE, GRAY, GREEN, INK, VERMILION, captioned_figure
from rm_optimizer.rl_coupling.readiness.report import ReadinessVerdict, RLReadinessReport

VERDICT_COLORS = {
    ReadinessVerdict.ready: GREEN,
    ReadinessVerdict.acceptable: "#B07800",
    ReadinessVerdict.not_recommended: VERMILION,
    ReadinessVerdict.unknown: GRAY,
}


def plot_readiness(report: RLReadinessReport) -> Figure:
    """The measured shares with their intervals and chance levels, and the verdict as the title.

    Args:
        report: a report of `measure_readiness`.
    """
    rows = [row for row in readiness_rows(report) if is_share(row.name)]
    of = "" if report.algorithm is None else f" for {report.algorithm}"
    caption = "95% intervals, gray ticks: chance, filled: in the score"
    figure, (axes,) = captioned_figure(f"Readiness{of}: {report.verdict}", caption)
    figure.set_size_inches(7.0, 1.6 + 0.34 * max(len(rows), 3))
    axes.title.set_color(INK)
    for place, row in enumerate(reversed(rows)):
        _draw_row(figure, place, row, VERDICT_COLORS[report.verdict])
    axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(False, axis="y")
    return figure


def _draw_row(figure: Figure, place: int, row: ReadinessRow, scored: str) -> None:
    axes, value = figure.axes[0], row.value
    is_scored = row.contribution is not None
    color = scored if is_scored else BLUE
    if (chance := chance_of(row.name)) is not None:
        axes.plot([chance] * 2, [place - 0.3, place + 0.3], color=GRAY, linewidth=1.5)
    if value.low is not None and value.high is not None:
        axes.plot([max(value.low, 0.0), min(value.high, 1.0)], [place] * 2, color=color, linewidth=2.0)
    face = color if is_scored else "white"
    axes.plot(min(max(value.value, 0.0), 1.0), place, "o", color=color, markerfacecolor=face, markersize=7)
