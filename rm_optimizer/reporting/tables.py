"""Results as tables in a terminal."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import LEAST_PAIRS, PairwiseMetrics
from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.tokens.audit import QUANTILES, DataAudit, SplitAudit
from rm_optimizer.records.quoting import markdown_line, markdown_table

if TYPE_CHECKING:  # it imports the model, which a command on data does not need
    from rm_optimizer.evaluation.saved_model import Evaluation

Cell = str | int | float | Estimate | None

LISTED_ANYHOW = 12
"""Most groups of a column that are all listed, even with few pairs."""
FEW_PROMPTS = 1 / 3
"""Effective share of prompts below which a line reports the number of prompts with half of the weight."""


def output_console() -> Console:
    """A console on standard output, as wide as the terminal; without a terminal, wide enough for every line."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=1000)


def summary_table(title: str, rows: Mapping[str, Cell]) -> Table:
    """A table of names and values: estimates with their interval, counts with thousands separated, None as n/a."""
    table = new_table(title, "", "")
    table.columns[1].justify = "left"
    for name, value in rows.items():
        table.add_row(Text(name), cell_text(value))
    return table


def metrics_rows(metrics: PairwiseMetrics) -> dict[str, Cell]:
    """Rows for `summary_table`: the main numbers of an evaluation; a collapse replaces the accuracy."""
    verdict: dict[str, Cell] = (
        {"verdict": metrics.collapse.reason} if metrics.collapse.collapsed else {"accuracy": metrics.accuracy}
    )
    macro = metrics.macro_accuracy
    if macro is not None and not metrics.collapse.collapsed:
        verdict[f"macro average over {macro.num_samples} sources"] = macro
    fit = metrics.temperature
    temperature: Cell = fit.temperature if fit.temperature is not None else f"none: {fit.reason}"
    return (
        verdict
        | _length_rows(metrics)
        | {
            "NLL (chance 0.693)": metrics.nll,
            "Brier (chance 0.250)": metrics.brier,
            f"ECE (noise floor {metrics.ece_noise_floor:.3f})": metrics.ece,
            "mean margin": metrics.mean_margin,
            "tied pairs": _percent(metrics.tie_rate),
            "temperature (scaling)": temperature,
            "pairs / prompts": f"{metrics.num_pairs:,} / {metrics.num_prompts:,}",
        }
        | _weight_row(metrics)
    )


def evaluation_rows(evaluation: Evaluation) -> dict[str, Cell]:
    """Rows for `summary_table`: the metrics of an evaluation, and notes on how to read them."""
    rows = metrics_rows(evaluation.metrics) | _roc_rows(evaluation.metrics)
    lists = {} if evaluation.best_of_n is None else {"": evaluation.best_of_n, **evaluation.best_of_n.by_subset}
    for name, best in lists.items():
        of = f"{name}: " if name else ""
        rows[f"{of}best of {best.mean_responses:.3g} ({best.num_lists:,} lists)"] = (
            f"{best.accuracy} (random {best.random:.3f}, longest {best.longest:.3f})"
        )
    rows["truncated"] = _cut(evaluation)
    if equal := evaluation.truncation.num_identical_dropped:
        rows["equal responses"] = f"{equal:,} pairs have one sequence of tokens on both sides and count as ties"
    rows["trained on"] = _trained_on(evaluation)
    return rows


def _roc_rows(metrics: PairwiseMetrics) -> dict[str, Cell]:
    """The area under the ROC curve, and the rates at the thresholds asked for."""
    rows: dict[str, Cell] = {} if metrics.collapse.collapsed else {"ROC-AUC (all prompts)": metrics.roc_auc}
    return rows | {
        f"reward ≥ {rates.threshold:g}": f"TPR {rates.tpr:.3f}, FPR {rates.fpr:.3f}, FNR {rates.fnr:.3f}"
        for rates in metrics.threshold_rates
    }


def _cut(evaluation: Evaluation) -> str:
    report = evaluation.truncation
    default = " (a default: the model records none; set --max-length)" if evaluation.has_default_length else ""
    text = f"at {report.max_length:,} tokens{default}"
    if not (report.num_prompt_cut or report.num_response_cut):
        return f"none, {text}"
    return (
        f"{text}: {report.num_prompt_cut:,} of {report.num_pairs:,} pairs lost prompt tokens, "
        f"{report.num_response_cut:,} response tokens"
    )


def _trained_on(evaluation: Evaluation) -> str:
    seen, metrics = evaluation.trained_on, evaluation.metrics
    if seen is None:
        return "unknown: nothing is recorded with the model"
    if not seen.num_pairs_of_prompts:
        return "none of these pairs or prompts"
    return (
        f"WARNING: {seen.num_pairs:,} of {metrics.num_pairs:,} pairs were trained on, and {seen.num_prompts:,} of "
        f"{metrics.num_prompts:,} prompts ({seen.num_pairs_of_prompts:,} pairs), case and blanks aside"
    )


def _length_rows(metrics: PairwiseMetrics) -> dict[str, Cell]:
    """The length baseline, and the model's difference from it."""
    if math.isnan(metrics.longer_wins.value):
        return {}
    rows: dict[str, Cell] = {"length baseline (longer wins)": metrics.longer_wins}
    if metrics.collapse.collapsed:
        return rows
    above, verdict = metrics.over_length, ""
    if above.high is not None and above.high < 0:
        verdict = ": below counting characters"
    elif above.low is not None and above.low <= 0:
        verdict = ": not shown to be above counting characters"
    return rows | {"accuracy − length baseline": f"{above}{verdict}"}


def _weight_row(metrics: PairwiseMetrics) -> dict[str, Cell]:
    if not metrics.num_effective_prompts < FEW_PROMPTS * metrics.num_prompts:
        return {}
    few, effective = metrics.num_prompts_of_half, metrics.num_effective_prompts
    text = f"{few:,} of {metrics.num_prompts:,} prompts have half of the weight of the pairs"
    return {"effective number of prompts": f"{effective:.1f}: {text}"}


def group_table(metrics: PairwiseMetrics, column: str) -> Group:
    """Accuracy for each value of a grouping column, largest group first, with the length baseline.

    If there are many groups, those with few pairs are only counted below the table; the JSON has all of them.
    """
    members = sorted(metrics.groups[column].items(), key=lambda item: (-item[1].num_pairs, item[0]))
    is_short = column == "source" or len(members) <= LISTED_ANYHOW
    listed = [item for item in members if is_short or item[1].num_pairs >= LEAST_PAIRS]
    knows_length = any(not math.isnan(group.longer_wins.value) for _, group in members)
    baseline = ["longer\nwins"] if knows_length else []
    table = new_table(f"By {column}", column, "pairs", "prompts", "accuracy", *baseline, "NLL", "ECE")
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    for name, group in listed:
        headline: Cell = "collapsed" if group.collapse.collapsed else group.accuracy
        longer: list[Cell] = [group.longer_wins.value] if knows_length else []
        cells = (group.num_pairs, group.num_prompts, headline, *longer, group.nll.value, group.ece.value)
        table.add_row(Text(name), *(cell_text(cell) for cell in cells))
    rest = len(members) - len(listed)
    note = Text(f"{rest:,} more with fewer than {LEAST_PAIRS} pairs each: see metrics.json", "dim")
    return Group(*[table] * bool(listed), *[note] * bool(rest))


def audit_tables(audit: DataAudit) -> Group:
    """The audit as tables: one column for each split, the sources of each, and the overlap of each two splits."""
    facts = new_table("Data audit", "", *audit.splits)
    columns = [_split_facts(split) for split in audit.splits.values()]
    for name in columns[0] if columns else ():
        facts.add_row(Text(name), *(cell_text(column[name]) for column in columns))
    parts: list[RenderableType] = [facts, *(_source_table(name, split) for name, split in audit.splits.items())]
    for overlap in audit.overlaps:
        share = f"{overlap.num_pairs_first:,} and {overlap.num_pairs_second:,} pairs"
        found = f"{overlap.num_prompts:,} prompts in both ({share})" if overlap.num_prompts else "no prompt in both"
        if overlap.num_continued_second:
            found += f"; {overlap.num_continued_second:,} pairs of {overlap.second} are of conversations that both hold"
        is_leak = overlap.num_prompts or overlap.num_continued_second
        parts.append(Text(f"{overlap.first} / {overlap.second}: {found}", "bold red" if is_leak else ""))
    return Group(*parts)


def example_table(name: str, pair: PreferencePair) -> Table:
    """Table of one pair as read: the messages before the responses, and the better response."""
    table = new_table(f"{name}: the first pair as it was understood", "", "")
    table.columns[1].justify = "left"
    for message in as_messages(pair.prompt):
        table.add_row(Text(message.role), Text(_beginning(message.content)))
    better = {1.0: "better", 0.0: "worse"}.get(pair.label, f"better with P={pair.label:g}")
    worse = {1.0: "worse", 0.0: "better"}.get(pair.label, "other")
    table.add_row(Text(f"chosen ({better})"), Text(_beginning(pair.chosen)))
    table.add_row(Text(f"rejected ({worse})"), Text(_beginning(pair.rejected)))
    return table


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def print_audit(audit: DataAudit, console: Console | None = None) -> None:
    """Print `audit_tables`."""
    (console or output_console()).print(audit_tables(audit))


def _split_facts(split: SplitAudit) -> dict[str, Cell]:
    def counted(number: int) -> str:
        return f"{number:,} ({_percent(number / split.num_pairs)})" if split.num_pairs else f"{number:,}"

    held = f", {', '.join(split.control_tokens[:3])}" if split.control_tokens else ""
    return {
        "pairs": split.num_pairs,
        "prompts": split.num_prompts,
        "rows skipped": split.num_skipped,
        "duplicate pairs": counted(split.num_duplicates),
        "contradictions": counted(split.num_contradictions),
        "identical after tokenization": counted(split.num_identical),
        "different in blanks alone": counted(split.num_blank_only),
        "truncated": counted(split.num_truncated),
        "prompt truncated differently": counted(split.num_uneven_cut),
        "response truncated": counted(split.num_response_cut),
        "control tokens in texts": counted(split.num_control_tokens) + held,
        f"chosen tokens ({_QUANTILE_NAMES})": _quantiles(split.chosen_tokens),
        f"rejected tokens ({_QUANTILE_NAMES})": _quantiles(split.rejected_tokens),
        "accuracy of \"longer wins\"": split.longer_wins,
        "accuracy of the best single word": f"{split.marker_wins.value:.3f}, {split.marker}",
        "with a margin": counted(split.num_margins),
        "label 0 (rejected is better)": counted(split.num_zero_labels),
        "with a soft label": counted(split.num_soft_labels),
    }  # fmt: skip


_SHOWN_CHARACTERS = 160
_SHOWN_QUANTILES = {0.5: "median", 0.95: "95%", 1.0: "most"}
_QUANTILE_NAMES = ", ".join(_SHOWN_QUANTILES.values())


def _quantiles(values: tuple[float, ...]) -> str:
    shown = (value for level, value in zip(QUANTILES, values, strict=True) if level in _SHOWN_QUANTILES)
    return ", ".join("n/a" if math.isnan(value) else f"{value:,.0f}" for value in shown)


def _source_table(name: str, split: SplitAudit) -> Table:
    table = new_table(f"{name}: sources", "source", "pairs", "prompts", "longer wins")
    for source, part in split.sources.items():
        table.add_row(Text(source), *(cell_text(cell) for cell in (part.num_pairs, part.num_prompts, part.longer_wins)))
    return table


def new_table(title: str, first: str, *others: str) -> Table:
    """An empty table with a heading in the common style; all columns but the first are right-aligned."""
    table = Table(
        title=Text(title, "bold"), title_justify="left", header_style="bold", show_header=any((first, *others))
    )
    table.add_column(Text(first), overflow="fold")
    for name in others:
        table.add_column(Text(name), justify="right", overflow="fold")
    return table


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        title: its heading.
        head: names of the columns.
        rows: cells, the first of each row its name.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def drawn(self) -> Table:
        """The table for a terminal."""
        table = new_table(self.title, *self.head)
        for column, cells in zip(table.columns, zip(*self.rows, strict=True), strict=True):
            has_numbers = any(re.match(r"[+−-]?\d", cell) for cell in cells)
            column.justify = "right" if has_numbers and column is not table.columns[0] else "left"
        for row in self.rows:
            table.add_row(*map(cell_text, row))
        return table

    def markdown(self) -> str:
        """The table in Markdown."""
        return f"**{markdown_line(self.title)}**\n\n{markdown_table(self.head, self.rows)}"


def _percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{share:.1%}"


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
