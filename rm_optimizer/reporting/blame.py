"""Tables, figure and page of the training pairs that taught a model something."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.data_efficiency.blame import Blame, GroupBlame, PairBlame
from rm_optimizer.records.files import write_rows, write_text
from rm_optimizer.reporting.document import Answer, Block, Code, Document, Drawing, Fold, Listing, Part
from rm_optimizer.reporting.figures import BLUE, GRAY, new_figure
from rm_optimizer.reporting.tables import Cell, TextTable, print_tables

BLAME_FILE, PAIRS_FILE = "blame.json", "influence.parquet"
"""Result, and the influence of each pair."""
_SUSPECT = 0.05
_MOST_SHOWN, _MOST_PRINTED, _WIDTH = 20, 8, 60


def blame_tables(found: Blame) -> dict[str, TextTable]:
    """Tables of a result by name: groups, and the pairs at both ends."""

    def pairs(title: str, given: Sequence[PairBlame]) -> TextTable:
        rows: Iterator[Mapping[str, Cell]] = (
            {
                "row": f"{pair.row:,}",
                "influence": f"{pair.influence:+.4g}",
                "words say": f"{pair.words:+.3g}",
                **pair.groups,
                "prompt": _short(pair.prompt),
            }
            for pair in given
        )
        return TextTable.of(title, rows)

    groups: Iterator[Mapping[str, Cell]] = (
        {
            "": f"{group.column} {group.name}",
            "pairs": group.num_pairs,
            "sum of influence": group.total,
            "per pair": f"{group.mean:+.2g}",
            "p (shuffled)": f"{group.p_value:.3f}",
            "words say": f"{group.words:+.3g}",
        }
        for group in found.groups[:_MOST_SHOWN]
    )
    return {
        "groups": TextTable.of("Groups of training pairs [95 % interval over prompts]", groups),
        "raised": pairs("Pairs that raised it most", found.raised),
        "lowered": pairs("Pairs that lowered it most", found.lowered),
    }


def notes_on_blame(found: Blame) -> tuple[str, ...]:
    """Sentences on how far to believe a result."""
    notes = []
    if found.validated is None and found.of == "eigenvector":
        notes.append("not validated")
    elif found.validated is None:
        notes.append("not validated: --validate N retrains N halves and measures how well influences predict them")
    else:
        notes.append(
            f"linear datamodeling score over {found.validated.num_samples} retrained halves: {found.validated:.2f}; of "
            f"the words of the texts alone: {found.words_score:.2f}; difference: {found.above_words:.2f}"
        )
        if found.above_words is not None and not (found.above_words.low or 0) > 0:
            notes.append("so influences of single pairs are not shown to say more than their words do")
    notes.append(f"rank correlation with what the words of the texts alone say: {found.agreement:.2f}")
    shares = ", ".join(f"{share:.2g}" for share in found.damping)
    notes.append(f"damping {shares} of the largest eigenvalue, by this rule: {found.rule}")
    if found.projection_error:
        notes.append(f"gradients are projected; an inner product is off by {found.projection_error:.1%} of the lengths")
    if found.num_left_out:
        notes.append(f"{found.num_left_out:,} training pairs are equal after truncation and have no influence")
    return tuple(notes)


def print_blame(found: Blame, console: Console | None = None) -> None:
    """Print the groups, the first pairs of both ends, and notes."""
    tables = blame_tables(found)
    for name in ("raised", "lowered"):
        table = tables[name]
        tables[name] = TextTable(table.title, table.head, table.rows[:_MOST_PRINTED])
    name = "the model" if found.num_models == 1 else f"{found.num_models} models"
    print(f"{found.target}: {found.value:.4f} by {name}; influence of {found.num_pairs:,} training pairs")
    print_tables((table for table in tables.values() if table.rows), notes_on_blame(found), console)


def plot_blame(found: Blame) -> Figure:
    """Sum of the influences of each group, with its interval over prompts."""
    shown = found.groups[:_MOST_SHOWN]
    caption = (
        f"n = {found.num_pairs:,} training pairs; bars: 95 % intervals over prompts; blue: p < {_SUSPECT} shuffled"
    )
    figure, (axes,) = new_figure(f"Influence on {found.target}", caption, height=2.2 + 0.35 * max(len(shown), 1))
    for place, group in enumerate(shown):
        color = BLUE if group.p_value < _SUSPECT else GRAY
        axes.named(place, f"{group.column} {group.name}", group.total, color=color)
    axes.axvline(0, color=GRAY, linewidth=0.8)
    axes.set_yticks(range(len(shown)), [f"{group.column} {group.name}" for group in shown])
    axes.set(ylim=(max(len(shown), 1) - 0.5, -0.5), xlabel="sum of influence")
    return figure


def blame_parts(found: Blame) -> list[Part]:
    """Parts of a page: groups, and the pairs with their texts side by side."""
    tables = blame_tables(found)
    drawing = [Drawing("blame_groups", plot_blame(found), "Sum of the influences of each group")] * bool(found.groups)
    return [
        Part("Groups", (*drawing, Listing("blame_groups", tables["groups"]), notes_on_blame(found))),
        Part("Pairs that raised it", (Listing("blame_raised", tables["raised"]), *_texts(found.raised))),
        Part("Pairs that lowered it", (Listing("blame_lowered", tables["lowered"]), *_texts(found.lowered))),
    ]


def _answer(found: Blame) -> Answer:
    """The groups that depart from the others, in a sentence."""
    stand_out = [group for group in found.groups if group.p_value < _SUSPECT]
    if not stand_out:
        return Answer("open", "No group of training pairs stands out", (_scale(found),))
    first = stand_out[0]
    headline = f"{first.column} {first.name} {'raised' if first.total.value > 0 else 'lowered'} it most"
    return Answer("fair", headline, (*map(_told, stand_out[:3]), _scale(found)))


def _told(group: GroupBlame) -> str:
    return (
        f"the {group.num_pairs:,} pairs of {group.column} {group.name} moved it by {group.total}, and only "
        f"{group.p_value:.1%} of shuffled assignments have such a group"
    )


def _scale(found: Blame) -> str:
    return f"the number is {found.target}, {found.value:.4f}; an influence is its change by a pair in training"


def _texts(pairs: Sequence[PairBlame]) -> Iterator[Block]:
    for pair in pairs:
        texts = TextTable("", ("chosen", "rejected"), ((pair.chosen, pair.rejected),))
        summary = f"row {pair.row:,}, {pair.influence:+.4g}: {_short(pair.prompt)}"
        yield Fold(summary, (Code(pair.prompt), Listing("", texts)))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def write_blame(found: Blame, folder: Path) -> Path:
    """Write `blame.json`, `influence.parquet` and the page with its files, and return the page's path.

    `influence.parquet` has a row for each training pair: its row, its influence, and what its words alone say.
    """
    write_text(folder / BLAME_FILE, found.to_json() + "\n")
    columns = zip(itertools.count(1), found.pair_ids, found.influence.tolist(), found.words.tolist())
    rows = [dict(zip(("row", "pair_id", "influence", "words"), row, strict=True)) for row in columns]
    write_rows(folder / PAIRS_FILE, rows)
    return Document(f"What taught the model: {found.target}", _answer(found), blame_parts(found)).write(folder)
