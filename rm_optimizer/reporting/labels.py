"""Tables, pictures and files about labels.

They show votes of annotators, and learning curves over the number of pairs.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from rm_optimizer.data_efficiency.scaling import ScalingReport
from rm_optimizer.data_efficiency.votes import NoiseCeiling, VoteCalibration
from rm_optimizer.records.files import write_text
from rm_optimizer.reporting.figures import BLUE, ORANGE, draw_legend, draw_reliability_bins, new_figure, save_figure
from rm_optimizer.reporting.tables import Cell, cell_text, new_table, output_console, summary_table

SCALING_FILE = "scaling.json"
VOTES_FILE = "votes.json"


def agreement_rows(ceiling: NoiseCeiling | None) -> dict[str, Cell]:
    """Rows for `summary_table`: agreement of annotators on the same pairs."""
    if ceiling is None:
        return {"agreement": "not known: no pair has two votes"}
    return {
        "two votes of a pair agree": ceiling.agreement,
        "the other votes' majority predicts a vote": ceiling.one_by_others,
        "another such group has the same majority": ceiling.majority,
        "ceiling of predicting a vote": ceiling.vote_ceiling,
        "ceiling of predicting the majority": ceiling.majority_ceiling,
    }


def report_votes(found: VoteCalibration, folder: Path) -> None:
    """Print a comparison of a model's probabilities with votes, and write `votes.json` and `plots/votes.png`."""
    write_text(folder / VOTES_FILE, found.to_json() + "\n")
    save_figure(plot_votes(found), folder / "plots" / "votes.png")
    rows: dict[str, Cell] = {
        "pairs / votes": f"{found.num_pairs:,} / {found.num_votes:,}",
        "a vote agrees with the model": found.vote_accuracy,
        "the majority agrees with the model": found.majority_accuracy,
        **agreement_rows(found.ceiling),
        "NLL of a vote (chance 0.693)": found.vote_nll,
        "ECE against shares of votes": found.ece,
        "correlation with shares of votes": found.correlation,
        "temperature fitted to votes": found.temperature,
    }
    output_console().print(summary_table("Votes of annotators", rows))


def plot_votes(found: VoteCalibration) -> Figure:
    """Share of votes for the preferred side, by the model's probability."""
    agreement = "" if found.ceiling is None else f", two votes agree {found.ceiling.agreement.value:.3f}"
    caption = f"{found.num_pairs:,} pairs, {found.num_votes:,} votes; ECE {found.ece:.3f}{agreement}"
    figure, (axes,) = new_figure("Probability and votes", caption)
    draw_reliability_bins(axes, found.bins, "as people vote", "model, 95% interval of independent pairs")
    lowest = min(one.frequency_low for one in found.bins)
    axes.set(xlim=(0.495, 1.005), ylim=(min(0.4, lowest - 0.02), 1.02))
    axes.set(xlabel="probability of the side that the model prefers", ylabel="share of votes for that side")
    draw_legend(axes, "upper left")
    return figure


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
    figure, (axes,) = new_figure(f"{words[:1].upper()}{words[1:]} by pairs", caption)
    for points, color, label in (
        (report.measured, BLUE, "measured"),
        (report.predicted, ORANGE, "predicted by the power law"),
    ):
        values = [getattr(point, metric) for point in points]
        axes.estimates([point.num_pairs for point in points], values, label, color=color, linestyle="--", linewidth=1.0)
    axes.set_xscale("log", base=2)
    sizes = [point.num_pairs for point in (*report.measured, *report.predicted)]
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set(xlabel="training pairs", ylabel=words)
    draw_legend(axes)
    return figure
