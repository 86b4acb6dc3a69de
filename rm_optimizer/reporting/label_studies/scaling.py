"""Table, picture and file of a learning curve over the number of pairs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rm_optimizer.data_efficiency.scaling import ScalingPoint, ScalingReport
from rm_optimizer.records.files import write_text
from rm_optimizer.reporting.style import BLUE, ORANGE, captioned_figure, draw_legend, save_figure
from rm_optimizer.reporting.tables import cell_text, new_table, output_console

SCALING_FILE = "scaling.json"


def write_scaling(report: ScalingReport, folder: Path) -> None:
    """Write `scaling.json`, `scaling_accuracy.png` and `scaling_nll.png`."""
    write_text(folder / SCALING_FILE, report.to_json() + "\n")
    for metric in ("accuracy", "nll"):
        save_figure(plot_scaling(report, metric), folder / f"scaling_{metric}.png")


def print_scaling(report: ScalingReport) -> None:
    """Print the curve, its extrapolation, and the number of further pairs."""
    console = output_console()
    table = new_table(f"Learning curve, {report.num_seeds} seeds", "pairs", "accuracy", "NLL, nats", "")
    for points, origin in ((report.measured, "measured"), (report.predicted, "predicted")):
        for point in points:
            table.add_row(f"{point.num_pairs:,}", cell_text(point.accuracy), cell_text(point.nll), origin)
    console.print(table)
    console.print(report.more.sentence, markup=False, highlight=False, soft_wrap=True)


def plot_scaling(report: ScalingReport, metric: str) -> Figure:
    """Validation metric over the number of training pairs, measured and extrapolated by the fitted law.

    Args:
        report: the curve.
        metric: `accuracy` or `nll`.
    """
    words = {"accuracy": "validation accuracy", "nll": "validation NLL (nats)"}[metric]
    caption = f"{report.num_seeds} seeds; bars: 95% intervals, of the prediction by laws drawn anew"
    figure, (axes,) = captioned_figure(f"{words[:1].upper()}{words[1:]} by pairs", caption)
    _draw(axes, report.measured, metric, BLUE, "measured")
    _draw(axes, report.predicted, metric, ORANGE, "predicted by the power law")
    axes.set_xscale("log", base=2)
    sizes = [point.num_pairs for point in (*report.measured, *report.predicted)]
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set(xlabel="training pairs", ylabel=words)
    draw_legend(axes)
    return figure


def _draw(axes: Axes, points: tuple[ScalingPoint, ...], metric: str, color: str, label: str) -> None:
    values = [getattr(point, metric) for point in points]
    sizes = [point.num_pairs for point in points]
    axes.plot(sizes, [one.value for one in values], "o--", color=color, markersize=4, linewidth=1.0, label=label)
    for size, one in zip(sizes, values, strict=True):
        if one.low is not None and one.high is not None:
            axes.plot([size, size], [one.low, one.high], color=color, linewidth=1.5)
