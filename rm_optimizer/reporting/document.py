"""Content of a page as values, and its rendering.

It becomes HTML or Markdown, with files next to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from rm_optimizer.records.files import write_csv, write_text
from rm_optimizer.records.quoting import markdown_line
from rm_optimizer.reporting import html
from rm_optimizer.reporting.figures import figure_rows, save_figure
from rm_optimizer.reporting.tables import TextTable

Tone = Literal["good", "fair", "bad", "open"]
"""Judgment that a color shows."""
PAGE_FILE = "index.html"
_META = "rm-opt-exhibits"
"""Name of the page's metadata element that lists the files next to the page."""


@dataclass(frozen=True)
class Answer:
    """The main result.

    Args:
        tone: judgment of it.
        headline: a few words.
        sentences: meaning in sentences; each gets a capital and a full stop.
    """

    tone: Tone
    headline: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """A figure and its numbers.

    Args:
        name: stem of its files.
        figure: the figure; None for numbers without a figure, which a page leaves out.
        caption: content in one sentence.
        rows: its numbers; None takes the rows that its panels keep.
    """

    name: str
    figure: Figure | None
    caption: str
    rows: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Listing:
    """A table.

    Args:
        name: stem of its file; empty writes none.
        table: the table; one without rows is left out.
        first: number of rows that are shown at once; the others open on a click. None shows all.
    """

    name: str
    table: TextTable
    first: int | None = None


@dataclass(frozen=True)
class Code:
    """Preformatted lines.

    Args:
        text: the lines.
    """

    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks that open on a click.

    Args:
        summary: the words to click on.
        blocks: its content.
    """

    summary: str
    blocks: tuple[Block, ...]


Block = Drawing | Listing | Code | Fold | str | tuple[str, ...]
"""A piece of a page; a text is a paragraph, and a tuple is a list of sentences."""


@dataclass(frozen=True)
class Part:
    """A part under a heading.

    Args:
        title: the heading.
        blocks: its content; a part without a block is left out.
    """

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """Content of a page.

    Args:
        title: its title.
        answer: the one thing to know.
        parts: the parts below.
    """

    title: str
    answer: Answer
    parts: Sequence[Part]

    def html(self) -> str:
        """The page as HTML."""
        answer = html.answer(self.answer.tone, self.answer.headline, *self.answer.sentences)
        return html.page(self.title, [answer, *(html.section(part.title, *_html(part.blocks)) for part in self.parts)])

    def markdown(self, *, with_figures: bool = False) -> str:
        """The page as Markdown.

        Args:
            with_figures: name the PNG files of the figures, which `write` puts next to the page; False leaves figures
                out, for a pull request.
        """
        answer = " ".join(
            [
                f"**{markdown_line(self.answer.headline)}.**",
                *(markdown_line(html.sentence(each)) for each in self.answer.sentences),
            ]
        )
        parts = [
            f"## {markdown_line(part.title)}\n\n{content}"
            for part in self.parts
            if (content := _markdown(part.blocks, with_figures=with_figures))
        ]
        return "\n\n".join([f"# {markdown_line(self.title)}", answer, *parts]) + "\n"

    def write(self, folder: Path) -> Path:
        """Write figures and tables, then the page, and return its path.

        Each file is written completely or not at all. Figures become PNG, SVG and CSV, and tables CSV. Files of an
        earlier page that this one does not have are removed. Other files stay.
        """
        earlier = _names(folder / PAGE_FILE)
        figures: dict[str, Figure] = {}
        tables: dict[str, Sequence[Mapping[str, Any]]] = {}
        for block in _flat(block for part in self.parts for block in part.blocks):
            if isinstance(block, Drawing) and block.figure is not None:
                figures[block.name] = block.figure
                tables[block.name] = figure_rows(block.figure) if block.rows is None else block.rows
            elif isinstance(block, Listing) and block.name and block.table.rows:
                first, *others = block.table.head
                tables[block.name] = [
                    dict(zip([first or "name", *others], row, strict=True)) for row in block.table.texts
                ]
        for name, figure in figures.items():
            save_figure(figure, folder / f"{name}.png", svg=True)
        for name, rows in tables.items():
            write_csv(folder / f"{name}.csv", rows)
        for name in earlier:
            kinds = [kind for kind, kept in (("png", figures), ("svg", figures), ("csv", tables)) if name not in kept]
            for kind in kinds:
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        listed = f'<meta name="{_META}" content="{escape(json.dumps(sorted({*figures, *tables})))}"></head>'
        return write_text(folder / PAGE_FILE, self.html().replace("</head>", listed, 1))


def _names(page: Path) -> set[str]:
    """Stems of the files that an earlier page lists.

    None if there is no such page.
    """
    try:
        found = re.search(rf'<meta name="{_META}" content="([^"]*)">', page.read_text(encoding="utf-8"))
        names = json.loads(unescape(found[1])) if found else []
    except (OSError, ValueError):
        return set()
    return {name for name in names if isinstance(name, str) and name == Path(name).name}


def _flat(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield from _flat(block.blocks) if isinstance(block, Fold) else (block,)


def _html(blocks: Sequence[Block]) -> Iterator[str]:
    for is_figure, group in groupby(blocks, lambda block: isinstance(block, Drawing)):
        shown = map(_block, group)
        yield html.figures(*shown) if is_figure else "\n".join(shown)


def _block(block: Block) -> str:
    match block:
        case Drawing():
            return "" if block.figure is None else html.drawn(block.figure, block.caption)
        case Listing():
            table, rows = block.table, block.table.texts
            if not rows:
                return ""
            rest = [] if block.first is None else rows[block.first :]
            further = html.table(f"{table.title}: the rest", table.head, rest)
            shown = html.table(table.title, table.head, rows[: block.first])
            return shown + (html.details(f"{len(rest):,} more", further) if rest else "")
        case Code():
            return html.code(block.text)
        case Fold():
            return html.details(block.summary, "\n".join(_html(block.blocks)))
        case str():
            return html.paragraph(block) if block else ""
    return html.bullets(block)


def _markdown(blocks: Sequence[Block], *, with_figures: bool) -> str:
    shown = []
    for block in blocks:
        match block:
            case Drawing() if with_figures and block.figure is not None:
                shown.append(f"![{markdown_line(block.caption)}]({block.name}.png)")
            case Listing() if block.table.rows:
                shown.append(block.table.markdown())
            case Code():
                shown.append(f"```\n{block.text}\n```")
            case Fold():
                shown.append(_markdown(block.blocks, with_figures=with_figures))
            case str():
                shown.append(markdown_line(block))
            case tuple():
                shown.append("\n".join(f"- {markdown_line(line)}" for line in block))
    return "\n\n".join(text for text in shown if text)
