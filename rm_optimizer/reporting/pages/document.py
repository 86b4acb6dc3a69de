"""The content of a study's page as values, and its rendering as HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from matplotlib.figure import Figure

from rm_optimizer.records.quoting import markdown_line
from rm_optimizer.reporting.pages import html
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.tables import TextTable

Tone = Literal["good", "fair", "bad", "open"]
"""Judgment that a color shows."""


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
    """A figure.

    Args:
        name: stem of its files.
        figure: the figure.
        caption: content in one sentence.
    """

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Listing:
    """A table.

    Args:
        name: stem of its file.
        table: the table; one without rows is left out.
    """

    name: str
    table: TextTable


@dataclass(frozen=True)
class Part:
    """A part under a heading.

    Args:
        title: the heading.
        blocks: figures, tables, paragraphs as text and lists of sentences; a part without a block is left out.
    """

    title: str
    blocks: tuple[Drawing | Listing | str | tuple[str, ...], ...]


@dataclass(frozen=True)
class Document:
    """The content of a study's page.

    Args:
        title: its title.
        answer: the one thing to know.
        parts: the parts below.
    """

    title: str
    answer: Answer
    parts: Sequence[Part]

    def html(self, exhibits: Exhibits) -> str:
        """The page as HTML.

        Args:
            exhibits: gains its figures and tables.
        """
        answer = html.answer(self.answer.tone, self.answer.headline, *self.answer.sentences)
        content = [answer, *(html.section(part.title, *_html(part, exhibits)) for part in self.parts)]
        return html.page(self.title, content)

    def markdown(self, *, with_figures: bool = False) -> str:
        """The same as Markdown.

        Args:
            with_figures: name the PNG files of the figures, which stand beside the page; False leaves figures out, for
                a pull request.
        """
        answer = " ".join(
            [
                f"**{markdown_line(self.answer.headline)}.**",
                *(markdown_line(html.sentence(each)) for each in self.answer.sentences),
            ]
        )
        parts = [text for part in self.parts if (text := _markdown(part, with_figures=with_figures))]
        return "\n\n".join([f"# {markdown_line(self.title)}", answer, *parts]) + "\n"


def _html(part: Part, exhibits: Exhibits) -> Iterator[str]:
    for is_drawing, blocks in groupby(part.blocks, lambda block: isinstance(block, Drawing)):
        shown = [_block(block, exhibits) for block in blocks]
        yield html.figures(*shown) if is_drawing else "\n".join(shown)


def _block(block: Drawing | Listing | str | tuple[str, ...], exhibits: Exhibits) -> str:
    if isinstance(block, Drawing):
        return exhibits.figure(block.name, block.figure, block.caption)
    if isinstance(block, Listing):
        table = block.table
        return exhibits.table(block.name, table.title, table.head, table.rows) if table.rows else ""
    if isinstance(block, str):
        return html.paragraph(block) if block else ""
    return html.bullets(block)


def _markdown(part: Part, *, with_figures: bool) -> str:
    shown = []
    for block in part.blocks:
        if isinstance(block, Drawing) and with_figures:
            shown.append(f"![{markdown_line(block.caption)}]({block.name}.png)")
        elif isinstance(block, Listing) and block.table.rows:
            shown.append(block.table.markdown())
        elif isinstance(block, str):
            shown.append(markdown_line(block))
        elif isinstance(block, tuple):
            shown.append("\n".join(f"- {markdown_line(line)}" for line in block))
    content = "\n\n".join(text for text in shown if text)
    return f"## {markdown_line(part.title)}\n\n{content}" if content else ""
