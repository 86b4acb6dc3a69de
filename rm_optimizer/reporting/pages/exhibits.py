"""Figures and tables that are in a page, and beside it as PNG, SVG and CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rm_optimizer.records.files import write_csv, write_text
from rm_optimizer.reporting.pages import html
from rm_optimizer.reporting.pages.figure_data import figure_rows
from rm_optimizer.reporting.style import save_figure

PAGE_FILE = "index.html"
_META = "rm-opt-exhibits"
"""Name of the page's metadata element that lists the files beside the page."""


@dataclass
class Exhibits:
    """Figures and tables by file name, collected while a page is made."""

    figures: dict[str, Figure] = field(default_factory=dict)
    tables: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def figure(self, name: str, figure: Figure, caption: str, rows: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A figure in the page; its numbers are in the alternative text and in `NAME.csv`.

        Args:
            name: stem of its files.
            figure: the figure.
            caption: content in one sentence.
            rows: its numbers; None reads them from its lines, bars and intervals.
        """
        self.figures[name] = figure
        self.tables[name] = list(figure_rows(figure) if rows is None else rows)
        return html.drawn(figure, caption)

    def table(
        self, name: str, caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, first: int | None = None
    ) -> str:
        """A table in the page (see `html.table`); rows after the first ones open on a click, and `NAME.csv` has all."""
        cells = list(rows)
        self.tables[name] = [dict(zip([head[0] or "name", *head[1:]], row, strict=True)) for row in cells]
        rest = [] if first is None else cells[first:]
        further = html.details(f"{len(rest):,} more", html.table(f"{caption}: the rest", head, rest)) if rest else ""
        return html.table(caption, head, cells[:first]) + further

    def write(self, folder: Path, content: str) -> Path:
        """Write the files, then the page, each completely or not at all; return the page's path.

        Files of an earlier page that this one does not have are removed. Other files stay.
        """
        earlier = _names(folder / PAGE_FILE)
        for name, figure in self.figures.items():
            save_figure(figure, folder / f"{name}.png", svg=True)
        for name, rows in self.tables.items():
            write_csv(folder / f"{name}.csv", rows)
        for name in earlier - self.figures.keys():
            for kind in ("png", "svg"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        for name in earlier - self.tables.keys():
            (folder / f"{name}.csv").unlink(missing_ok=True)
        names = escape(json.dumps(sorted({*self.figures, *self.tables})))
        listed = content.replace("</head>", f'<meta name="{_META}" content="{names}"></head>', 1)
        return write_text(folder / PAGE_FILE, listed)


def _names(page: Path) -> set[str]:
    """Stems of the files that an earlier page lists; none if there is no such page."""
    try:
        found = re.search(rf'<meta name="{_META}" content="([^"]*)">', page.read_text(encoding="utf-8"))
        names = json.loads(unescape(found[1])) if found else []
    except (OSError, ValueError):
        return set()
    return {name for name in names if isinstance(name, str) and name == Path(name).name}
