"""Votes of annotators: sentence, table and picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from rm_optimizer.data_efficiency.votes import NoiseCeiling, VoteCalibration
from rm_optimizer.records.files import write_text
from rm_optimizer.reporting.style import BLUE, GRAY, draw_legend, new_figure, save_figure
from rm_optimizer.reporting.tables import Cell, output_console, summary_table

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
    """Share of votes for the side that the model prefers, by the model's probability of that side."""
    agreement = "" if found.ceiling is None else f", two votes agree {found.ceiling.agreement.value:.3f}"
    caption = f"{found.num_pairs:,} pairs, {found.num_votes:,} votes; ECE {found.ece:.3f}{agreement}"
    figure, (axes,) = new_figure("Probability and votes", caption)
    middle = np.array([one.mean_confidence for one in found.bins])
    share = np.array([one.frequency for one in found.bins])
    below = share - [one.frequency_low for one in found.bins]
    above = np.array([one.frequency_high for one in found.bins]) - share
    axes.plot([0.5, 1.0], [0.5, 1.0], color=GRAY, linestyle="--", linewidth=1.2, label="as people vote")
    axes.errorbar(
        middle, share, yerr=[below, above], color=BLUE, marker="o", markersize=5, linewidth=1.6, capsize=3,
        label="model, 95% interval of independent pairs",
    )  # fmt: skip
    axes.set(xlim=(0.495, 1.005), ylim=(min(0.4, float(np.min(share - below)) - 0.02), 1.02))
    axes.set(xlabel="probability of the side that the model prefers", ylabel="share of votes for that side")
    draw_legend(axes, "upper left")
    return figure
