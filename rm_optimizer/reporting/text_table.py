"""A table of text for a terminal, a page or a Markdown file."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from rm_optimizer.records.quoting import markdown_line, markdown_table
from rm_optimizer.reporting.tables import new_table


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
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> str:
        """The table in Markdown."""
        return f"**{markdown_line(self.title)}**\n\n{markdown_table(self.head, self.rows)}"
