"""Results as tables in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rm_optimizer.core.audit import QUANTILES, DataAudit, SplitAudit
from rm_optimizer.core.estimate import Estimate
from rm_optimizer.core.metrics import PairwiseMetrics

Cell = str | int | float | Estimate | None


def summary_table(title: str, rows: Mapping[str, Cell]) -> Table:
    """A table of names and values: estimates with their interval, counts with thousands separated, None as n/a.

    Args:
        title: what is summarised.
        rows: value of each row, in order.
    """
    table = _new_table(title, "", "")
    table.columns[1].justify = "left"
    for name, value in rows.items():
        table.add_row(Text(name), _cell(value))
    return table


def metrics_rows(metrics: PairwiseMetrics) -> dict[str, Cell]:
    """Rows for `summary_table`: the headline numbers of an evaluation; a collapse comes first, in accuracy's place."""
    verdict: dict[str, Cell] = (
        {"verdict": metrics.collapse.reason} if metrics.collapse.collapsed else {"accuracy": metrics.accuracy}
    )
    fit = metrics.temperature
    temperature: Cell = fit.temperature if fit.temperature is not None else f"none: {fit.reason}"
    return verdict | {
        "NLL (chance 0.693)": metrics.nll,
        "Brier (chance 0.250)": metrics.brier,
        f"ECE (noise floor {metrics.ece_noise_floor:.3f})": metrics.ece,
        "mean margin": metrics.mean_margin,
        "tied pairs": _percent(metrics.tie_rate),
        "fitted temperature": temperature,
        "pairs / prompts": f"{metrics.num_pairs:,} / {metrics.num_prompts:,}",
    }


def group_table(
    metrics: PairwiseMetrics, column: str, *, longer_wins: Mapping[str, Estimate | float] | None = None
) -> Table:
    """Accuracy of each value of a grouping column, largest group first, beside the length baseline.

    Args:
        metrics: with `groups[column]`.
        column: the grouping column, such as "source".
        longer_wins: accuracy of calling the longer response better, for each value; without it there is no such column.
    """
    baseline = [] if longer_wins is None else ["longer wins"]
    table = _new_table(f"By {column}", column, "pairs", "prompts", "accuracy", *baseline, "NLL", "ECE")
    members = metrics.groups[column].items()
    for name, group in sorted(members, key=lambda item: (-item[1].num_pairs, item[0])):
        headline: Cell = "collapsed" if group.collapse.collapsed else group.accuracy
        longer: list[Cell] = [] if longer_wins is None else [longer_wins.get(name)]
        cells = (group.num_pairs, group.num_prompts, headline, *longer, group.nll.value, group.ece.value)
        table.add_row(Text(name), *(_cell(cell) for cell in cells))
    return table


def audit_tables(audit: DataAudit) -> Group:
    """The audit: one column for each split, the sources of each, and what two splits share."""
    facts = _new_table("Data audit", "", *audit.splits)
    columns = [_split_facts(split) for split in audit.splits.values()]
    for name in columns[0] if columns else ():
        facts.add_row(Text(name), *(_cell(column[name]) for column in columns))
    parts: list[RenderableType] = [facts, *(_source_table(name, split) for name, split in audit.splits.items())]
    for overlap in audit.overlaps:
        share = f"{overlap.num_pairs_first:,} and {overlap.num_pairs_second:,} pairs"
        found = f"{overlap.num_prompts:,} prompts in both ({share})" if overlap.num_prompts else "no prompt in both"
        parts.append(Text(f"{overlap.first} / {overlap.second}: {found}", "bold red" if overlap.num_prompts else ""))
    return Group(*parts)


def print_audit(audit: DataAudit, console: Console | None = None) -> None:
    """Print `audit_tables`.

    Args:
        audit: of one or more splits.
        console: where to; standard output unless given.
    """
    (console or Console()).print(audit_tables(audit))


def _split_facts(split: SplitAudit) -> dict[str, Cell]:
    def counted(number: int) -> str:
        return f"{number:,} ({_percent(number / split.num_pairs)})" if split.num_pairs else f"{number:,}"

    return {
        "pairs": split.num_pairs,
        "prompts": split.num_prompts,
        "rows skipped": split.num_skipped,
        "duplicate pairs": counted(split.num_duplicates),
        "contradictions": counted(split.num_contradictions),
        "identical after truncation": counted(split.num_identical),
        "truncated": counted(split.num_truncated),
        "response truncated": counted(split.num_response_cut),
        f"chosen tokens ({_QUANTILE_NAMES})": _quantiles(split.chosen_tokens),
        f"rejected tokens ({_QUANTILE_NAMES})": _quantiles(split.rejected_tokens),
        "accuracy of \"longer wins\"": split.longer_wins,
        "with a margin": counted(split.num_margins),
        "with a soft label": counted(split.num_soft_labels),
    }  # fmt: skip


_SHOWN_QUANTILES = {0.5: "median", 0.95: "95%", 1.0: "most"}
_QUANTILE_NAMES = ", ".join(_SHOWN_QUANTILES.values())


def _quantiles(values: tuple[float, ...]) -> str:
    shown = (value for level, value in zip(QUANTILES, values, strict=True) if level in _SHOWN_QUANTILES)
    return ", ".join("n/a" if math.isnan(value) else f"{value:,.0f}" for value in shown)


def _source_table(name: str, split: SplitAudit) -> Table:
    table = _new_table(f"{name}: sources", "source", "pairs", "prompts", "longer wins")
    for source, part in split.sources.items():
        table.add_row(Text(source), *(_cell(cell) for cell in (part.num_pairs, part.num_prompts, part.longer_wins)))
    return table


def _new_table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=Text(title, "bold"), title_justify="left", header_style="bold", show_header=any((first, *others))
    )
    table.add_column(Text(first))
    for name in others:
        table.add_column(Text(name), justify="right")
    return table


def _percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{share:.1%}"


def _cell(value: Cell) -> Text:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Text("n/a", "dim")
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    if isinstance(value, int):
        return Text(f"{value:,}")
    text = str(value)
    return Text(text, "bold red" if text.startswith("collapsed") else "")
