"""Tables of an audit, and of one pair as it was read."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.audit import QUANTILES, DataAudit, SplitAudit, example_lines
from rm_optimizer.reporting.tables import Cell, TextTable, output_console, percent

_SHOWN_QUANTILES = {0.5: "median", 0.95: "95%", 1.0: "most"}


def print_audit(audit: DataAudit, console: Console | None = None) -> None:
    """Print an audit: one column for each split, the sources of each, and the overlap of each two splits."""
    columns = [_split_facts(split) for split in audit.splits.values()]
    facts = tuple((name, *(column[name] for column in columns)) for name in (columns[0] if columns else ()))
    parts: list[RenderableType] = [TextTable("Data audit", ("", *audit.splits), facts).drawn()]
    for name, split in audit.splits.items():
        sources = split.sources.items()
        rows = tuple((source, part.num_pairs, part.num_prompts, part.longer_wins) for source, part in sources)
        parts.append(TextTable(f"{name}: sources", ("source", "pairs", "prompts", "longer wins"), rows).drawn())
    for overlap in audit.overlaps:
        share = f"{overlap.num_pairs_first:,} and {overlap.num_pairs_second:,} pairs"
        found = f"{overlap.num_prompts:,} prompts in both ({share})" if overlap.num_prompts else "no prompt in both"
        if overlap.num_continued_second:
            found += f"; {overlap.num_continued_second:,} pairs of {overlap.second} are of conversations that both hold"
        is_leak = overlap.num_prompts or overlap.num_continued_second
        parts.append(Text(f"{overlap.first} / {overlap.second}: {found}", "bold red" if is_leak else ""))
    (console or output_console()).print(Group(*parts))


def _split_facts(split: SplitAudit) -> dict[str, Cell]:
    """The column of a split, by the names of its rows."""

    def counted(number: int) -> str:
        return f"{number:,} ({percent(number / split.num_pairs)})" if split.num_pairs else f"{number:,}"

    def quantiles(values: tuple[float, ...]) -> str:
        shown = (value for level, value in zip(QUANTILES, values, strict=True) if level in _SHOWN_QUANTILES)
        return ", ".join("n/a" if math.isnan(value) else f"{value:,.0f}" for value in shown)

    held = f", {', '.join(split.control_tokens[:3])}" if split.control_tokens else ""
    names = ", ".join(_SHOWN_QUANTILES.values())
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
        f"chosen tokens ({names})": quantiles(split.chosen_tokens),
        f"rejected tokens ({names})": quantiles(split.rejected_tokens),
        "accuracy of \"longer wins\"": split.longer_wins,
        "accuracy of the best single word": f"{split.marker_wins.value:.3f}, {split.marker}",
        "with a margin": counted(split.num_margins),
        "label 0 (rejected is better)": counted(split.num_zero_labels),
        "with a soft label": counted(split.num_soft_labels),
    }  # fmt: skip


def print_example(name: str, pair: PreferencePair) -> None:
    """Print one pair as it was read, with its better response."""
    table = TextTable(f"{name}: the first pair as it was understood", ("", ""), tuple(example_lines(pair)))
    output_console().print(table.drawn())
