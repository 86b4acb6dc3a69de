"""Results as tables in a terminal, on a page and in Markdown."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import LEAST_PAIRS, PairwiseMetrics
from rm_optimizer.records.quoting import markdown_line, markdown_table

if TYPE_CHECKING:  # it imports the model, which a command on data does not need
    from rm_optimizer.evaluation.saved_model import Evaluation

Cell = str | int | float | Estimate | None

SCORE_NAMES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
LISTED_ANYHOW = 12
"""Most groups of a column that are all listed, even with few pairs."""
FEW_PROMPTS = 1 / 3
"""Effective share of prompts below which a line reports the number of prompts with half of the weight."""


@dataclass(frozen=True)
class TextTable:
    """A table of values.

    Estimates have their interval, counts their thousands separated, and None is n/a.

    Args:
        title: its heading.
        head: names of the columns; all empty for a table of names and values.
        rows: cells, the first of each row its name.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, Cell]]) -> TextTable:
        """A table of rows that have the same columns, whose names are its head."""
        found = list(rows)
        return cls(title, tuple(found[0]) if found else (), tuple(tuple(row.values()) for row in found))

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """The rows as text."""
        return tuple(tuple(cell_text(cell).plain for cell in row) for row in self.rows)

    def drawn(self) -> Table:
        """The table for a terminal, with numbers to the right.

        Values without a head are to the left.
        """
        table = new_table(self.title, *self.head)
        for column, cells in zip(table.columns, zip(*self.texts, strict=True), strict=False):  # no cells without rows
            has_numbers = any(self.head) and any(re.match(r"[+−-]?\d", cell) for cell in cells)
            column.justify = "right" if has_numbers and column is not table.columns[0] else "left"
        for row in self.rows:
            table.add_row(*map(cell_text, row))
        return table

    def markdown(self) -> str:
        """The table in Markdown."""
        return f"**{markdown_line(self.title)}**\n\n{markdown_table(self.head, self.texts)}"


def cell_text(value: Cell) -> Text:
    """A value as text of a table: n/a for None, warnings in red."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Text("n/a", "dim")
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, Estimate) and value.num_samples == 1 and value.low is None:
        return Text(f"{value} (1 prompt: no interval)")
    text = str(value)
    return Text(text, "bold red" if text.startswith(("collapsed", "WARNING")) else "")


def new_table(title: str, first: str, *others: str) -> Table:
    """An empty table with a heading in the common style.

    All columns but the first are right-aligned.
    """
    table = Table(
        title=Text(title, "bold"), title_justify="left", header_style="bold", show_header=any((first, *others))
    )
    table.add_column(Text(first), overflow="fold")
    for name in others:
        table.add_column(Text(name), justify="right", overflow="fold")
    return table


def output_console() -> Console:
    """A console on standard output, as wide as the terminal.

    Without a terminal it is wide enough for every line.
    """
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=1000)


def print_line(text: str, console: Console) -> None:
    """Print text as it is, without markup, colors or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_tables(tables: Iterable[TextTable], notes: Iterable[str], console: Console | None = None) -> None:
    """Print the tables that have rows, and notes on how to read them.

    Args:
        tables: the tables.
        notes: sentences.
        console: destination; None is standard output.
    """
    console = console or output_console()
    for table in tables:
        if table.rows:
            console.print(table.drawn())
    for note in notes:
        print_line(f"note: {note}", console)


def summary_table(title: str, rows: Mapping[str, Cell]) -> Table:
    """A table of names and values."""
    return TextTable(title, ("", ""), tuple(rows.items())).drawn()


def metrics_rows(metrics: PairwiseMetrics) -> dict[str, Cell]:
    """Rows for `summary_table`: the main numbers of an evaluation; a collapse replaces the accuracy."""
    rows: dict[str, Cell] = {}
    above, macro, is_collapsed = metrics.over_length, metrics.macro_accuracy, metrics.collapse.collapsed
    if is_collapsed:
        rows["verdict"] = metrics.collapse.reason
    else:
        rows["accuracy"] = metrics.accuracy
        rows |= {} if macro is None else {f"macro average over {macro.num_samples} sources": macro}
    if not math.isnan(metrics.longer_wins.value):
        rows["length baseline (longer wins)"] = metrics.longer_wins
        if not is_collapsed:
            verdict = ""
            if above.high is not None and above.high < 0:
                verdict = ": below counting characters"
            elif above.low is not None and above.low <= 0:
                verdict = ": not shown to be above counting characters"
            rows["accuracy − length baseline"] = f"{above}{verdict}"
    fit = metrics.temperature
    rows |= {
        "NLL (chance 0.693)": metrics.nll,
        "Brier (chance 0.250)": metrics.brier,
        f"ECE (noise floor {metrics.ece_noise_floor:.3f})": metrics.ece,
        "mean margin": metrics.mean_margin,
        "tied pairs": percent(metrics.tie_rate),
        "temperature (scaling)": fit.temperature if fit.temperature is not None else f"none: {fit.reason}",
        "pairs / prompts": f"{metrics.num_pairs:,} / {metrics.num_prompts:,}",
    }
    few, effective = metrics.num_prompts_of_half, metrics.num_effective_prompts
    if effective < FEW_PROMPTS * metrics.num_prompts:
        text = f"{few:,} of {metrics.num_prompts:,} prompts have half of the weight of the pairs"
        rows["effective number of prompts"] = f"{effective:.1f}: {text}"
    return rows


def evaluation_rows(evaluation: Evaluation) -> dict[str, Cell]:
    """Rows for `summary_table` about an evaluation.

    They are the metrics, and notes on how to read them.
    """
    metrics, cut, seen = evaluation.metrics, evaluation.truncation, evaluation.trained_on
    rows = metrics_rows(metrics)
    if not metrics.collapse.collapsed:
        rows["ROC-AUC (all prompts)"] = metrics.roc_auc
    for rates in metrics.threshold_rates:
        rows[f"reward ≥ {rates.threshold:g}"] = f"TPR {rates.tpr:.3f}, FPR {rates.fpr:.3f}, FNR {rates.fnr:.3f}"
    lists = {} if evaluation.best_of_n is None else {"": evaluation.best_of_n, **evaluation.best_of_n.by_subset}
    for name, best in lists.items():
        of = f"{name}: " if name else ""
        rows[f"{of}best of {best.mean_responses:.3g} ({best.num_lists:,} lists)"] = (
            f"{best.accuracy} (random {best.random:.3f}, longest {best.longest:.3f})"
        )
        rows[f"{of}every best response leads"] = best.every_best
        rows[f"{of}Kendall's tau within lists"] = best.tau
    default = " (a default: the model records none; set --max-length)" if evaluation.has_default_length else ""
    rows["truncated"] = f"none, at {cut.max_length:,} tokens{default}"
    if cut.num_prompt_cut or cut.num_response_cut:
        rows["truncated"] = (
            f"at {cut.max_length:,} tokens{default}: {cut.num_prompt_cut:,} of {cut.num_pairs:,} pairs lost prompt "
            f"tokens, {cut.num_response_cut:,} response tokens"
        )
    if equal := cut.num_identical_dropped:
        rows["equal responses"] = f"{equal:,} pairs have one sequence of tokens on both sides and count as ties"
    if evaluation.turned is not None:
        rows[f"order turned by {evaluation.turned.dtype}"] = str(evaluation.turned)
    if seen is None:
        rows["trained on"] = "unknown: nothing is recorded with the model"
    elif not seen.num_pairs_of_prompts:
        rows["trained on"] = "none of these pairs or prompts"
    else:
        rows["trained on"] = (
            f"WARNING: {seen.num_pairs:,} of {metrics.num_pairs:,} pairs were trained on, and {seen.num_prompts:,} of "
            f"{metrics.num_prompts:,} prompts ({seen.num_pairs_of_prompts:,} pairs), case and blanks aside"
        )
    return rows


def group_rows(metrics: PairwiseMetrics, column: str) -> TextTable:
    """Accuracy for each value of a grouping column, largest group first.

    The length baseline is added where it is known.
    """
    members = sorted(metrics.groups[column].items(), key=lambda item: (-item[1].num_pairs, item[0]))
    knows_length = any(not math.isnan(group.longer_wins.value) for _, group in members)
    head = (column, "pairs", "prompts", "accuracy [95 %]", *["longer wins"] * knows_length, "NLL", "ECE")
    rows = tuple(
        (
            name,
            group.num_pairs,
            group.num_prompts,
            "collapsed" if group.collapse.collapsed else group.accuracy,
            *[group.longer_wins.value] * knows_length,
            group.nll.value,
            group.ece.value,
        )
        for name, group in members
    )
    return TextTable(f"Each {column}, the largest first", head, rows)


def group_table(metrics: PairwiseMetrics, column: str) -> Group:
    """The rows of `group_rows` for a terminal.

    If there are many groups, those with few pairs are only counted below the table; the JSON has all of them.
    """
    found, groups = group_rows(metrics, column), metrics.groups[column]
    is_short = column == "source" or len(groups) <= LISTED_ANYHOW
    listed = tuple(row for row in found.rows if is_short or groups[str(row[0])].num_pairs >= LEAST_PAIRS)
    head = tuple(name.replace("longer wins", "longer\nwins") for name in found.head)
    table, rest = replace(found, title=f"By {column}", head=head, rows=listed).drawn(), len(groups) - len(listed)
    for numbers in table.columns[1:]:
        numbers.no_wrap, numbers.justify = True, "right"
    note = Text(f"{rest:,} more with fewer than {LEAST_PAIRS} pairs each: see metrics.json", "dim")
    return Group(*[table] * bool(listed), *[note] * bool(rest))


def print_evaluation(title: str, evaluation: Evaluation, console: Console | None = None) -> None:
    """Print one evaluation, and the metrics of its groups."""
    console = console or output_console()
    console.print(summary_table(title, evaluation_rows(evaluation)))
    for column in evaluation.metrics.groups:
        console.print(group_table(evaluation.metrics, column))


def percent(share: float) -> str:
    """A share as text, n/a if it is NaN."""
    return "n/a" if math.isnan(share) else f"{share:.1%}"
