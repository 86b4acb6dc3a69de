"""Table and file of a cleaning study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.data_efficiency.cleaning.cleaning_study import CleaningRow
from rm_optimizer.records.files import write_text
from rm_optimizer.reporting.tables import TextTable, cell_text, output_console

CLEANING_FILE = "cleaning.json"


CLEANING_LEGEND = (
    "AUROC: turned labels told from others by held-out probability; estimate: estimated share of turned labels; "
    "out: share of the pairs taken out; wrong: share of these that were turned; gain: points of test accuracy "
    "without them; at random: the same without as many random pairs; exact: the same without the turned labels and no "
    "others, which is the most that finding them could gain"
)


def write_cleaning(rows: Sequence[CleaningRow], folder: Path) -> None:
    """Write `cleaning.json`."""
    write_text(folder / CLEANING_FILE, "[" + ",\n".join(row.to_json() for row in rows) + "]\n")


def print_cleaning(rows: Sequence[CleaningRow]) -> None:
    """Print a row for each pool and share of flips. Gains are in points of accuracy."""
    console = output_console()
    console.print(cleaning_table(rows).drawn())
    console.print(CLEANING_LEGEND, soft_wrap=True)


def cleaning_table(rows: Sequence[CleaningRow]) -> TextTable:
    """Table with a row for each pool and share of flips; see `CLEANING_LEGEND`."""
    head = ("pool", "splits x pairs", "flips", "AUROC", "estimate", "out", "wrong", "gain", "at random", "exact")
    cells = tuple(
        (
            row.pool,
            f"{row.num_splits} x {row.num_pairs:,}",
            f"{row.flips:.0%}",
            "" if row.auroc is None else str(cell_text(row.auroc)),
            f"{row.estimated.value:.1%}",
            f"{row.suspected.value:.1%}",
            "" if row.precision is None else f"{row.precision.value:.0%}",
            gain_text(row.gain),
            gain_text(row.fewer_gain),
            "" if row.exact_gain is None else gain_text(row.exact_gain),
        )
        for row in rows
    )
    return TextTable("Training without suspected labels, by splits", head, cells)


def gain_text(gain: Estimate) -> str:
    """A gain in accuracy in points, with its interval."""
    if gain.value == gain.standard_error == 0:
        return "0"
    interval = "" if gain.low is None or gain.high is None else f" [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    return f"{100 * gain.value:+.2f}{interval}"
