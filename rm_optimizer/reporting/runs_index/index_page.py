"""The index page: a table of runs and studies to sort and filter, with a sparkline of each run's validation loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from rm_optimizer.records.run_folder import METRICS_FILE, read_rows
from rm_optimizer.reporting.pages.html import escape, page, paragraph
from rm_optimizer.reporting.runs_index.listing import DEEPEST, ListedFolder, Score

SPARKLINE = "loss.svg"
"""Address of a run's sparkline, relative to its page's address."""
_WIDTH, _HEIGHT = 110, 26
_HEAD = (
    *(
        "name",
        "state",
        "model",
        "optimizer",
        "seed",
        "accuracy [95 %]",
        "validation loss",
        "accuracy − length baseline",
    ),
    *("NLL", "ECE", "minutes", "last result (UTC)"),
)
_STYLE = """
main{max-width:110rem}.tools{display:flex;gap:1rem;align-items:baseline;flex-wrap:wrap;margin:1rem 0}
.tools input{font:inherit;color:inherit;background:var(--card);border:1px solid var(--soft);border-radius:.3rem;
padding:.3rem .6rem;min-width:min(100%,18rem)}
th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;text-align:left}
th[aria-sort=ascending] button::after{content:" ▲"}th[aria-sort=descending] button::after{content:" ▼"}
td img{display:block}tbody th{min-width:12rem}tbody td{white-space:nowrap}
#runs th,#runs td{padding-right:.9rem;font-size:.92rem}
"""
_SPARKLINE_STYLE = (
    "polyline{fill:none;stroke:#0062a3;stroke-width:1.5}circle{fill:#0062a3}"
    "@media(prefers-color-scheme:dark){polyline{stroke:#6cb8ee}circle{fill:#6cb8ee}}"
)


def index_page(root: Path, entries: Sequence[ListedFolder], num_passed: int) -> str:
    """The page as HTML.

    Args:
        root: the folder of the list.
        entries: its runs and studies.
        num_passed: links and deep folders that were passed over.
    """
    title = f"Runs and studies in {root}"
    passed = f"{num_passed:,} links, folders deeper than {DEEPEST} levels and unreadable ones were passed over."
    script = files("rm_optimizer.reporting.runs_index").joinpath("table.js").read_text(encoding="utf-8")
    parts = [
        '<div class="tools"><label>Filter <input type="search" id="filter" autocomplete="off"></label>'
        f'<span id="count" role="status">{len(entries):,} of {len(entries):,}</span></div>',
        _table(entries) if entries else paragraph("There is no run and no study yet; reload when one has begun."),
        paragraph(passed) if num_passed else "",
        f"<script>{script}</script>",
    ]
    return page(title, parts, style=_STYLE)


def _table(entries: Sequence[ListedFolder]) -> str:
    head = "".join(
        f'<th scope="col" aria-sort="{"descending" if name == _HEAD[-1] else "none"}"><button>{escape(name)}</button>'
        "</th>"
        for name in _HEAD
    )
    body = "\n".join(map(_row, entries))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Runs and studies"><table id="runs">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def sparkline(run_dir: Path) -> str:
    """Validation loss of a run by step as a small SVG, which is empty with fewer than two evaluations."""
    points = []
    try:
        for row in read_rows(run_dir / METRICS_FILE):
            if row.get("eval_loss"):
                points.append((int(row["step"]), float(row["eval_loss"])))
    except (OSError, ValueError, KeyError, TypeError):
        points = []
    points = [point for point in points if math.isfinite(point[1])]
    drawn = ""
    if len(points) > 1:
        steps, losses = zip(*points, strict=True)
        across, down = (max(values) - min(values) or 1 for values in (steps, losses))
        places = [
            (2 + (_WIDTH - 4) * (step - min(steps)) / across, 2 + (_HEIGHT - 4) * (max(losses) - loss) / down)
            for step, loss in points
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        x, y = places[-1]
        drawn = f'<polyline points="{line}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_SPARKLINE_STYLE}</style>{drawn}</svg>'


def as_address(name: str) -> str:
    """Encode a name as one part of an address.

    Example:
        >>> as_address("sweep/lr=0.1"), as_name("sweep%2Flr%3D0.1")
        ('sweep%2Flr%3D0.1', 'sweep/lr=0.1')
    """
    return quote(name.encode("utf-8", "surrogateescape"), safe="") or "."


def as_name(address: str) -> str:
    """Decode the name from an address by `as_address`."""
    return "" if address == "." else unquote_to_bytes(address).decode("utf-8", "surrogateescape")


def _row(entry: ListedFolder) -> str:
    address = f"folder/{as_address(entry.name)}/"
    image = (
        f'<img src="{address}{SPARKLINE}" alt="" loading="lazy" width="{_WIDTH}" height="{_HEIGHT}">'
        if entry.is_run
        else ""
    )
    changed = datetime.fromtimestamp(entry.changed, UTC).strftime("%Y-%m-%d %H:%M")
    cells = [
        *(f"<td>{escape(text)}</td>" for text in (entry.state, entry.model, entry.optimizer)),
        _number("" if entry.seed is None else str(entry.seed), entry.seed),
        _number(_interval(entry.accuracy, ""), entry.accuracy.value),
        f"<td>{image}</td>",
        _number(_interval(entry.over_length, "+"), entry.over_length.value),
        *(_number(_interval(score, "", is_short=True), score.value) for score in (entry.nll, entry.ece)),
        _number("" if math.isnan(entry.minutes) else f"{entry.minutes:,.1f}", entry.minutes),
        _number(changed, entry.changed),
    ]
    name = escape(entry.name or ".")
    return f'<tr><th scope="row"><a href="{address}">{name}</a></th>{"".join(cells)}</tr>'


def _number(text: str, value: float | None) -> str:
    known = value is not None and math.isfinite(value)
    return f'<td data-sort="{value!r}">{text}</td>' if known else f"<td>{text}</td>"


def _interval(score: Score, sign: str, *, is_short: bool = False) -> str:
    if math.isnan(score.value):
        return ""
    if is_short or score.low is None or score.high is None:
        return f"{score.value:{sign}.3f}"
    return f"{score.value:{sign}.3f} [{score.low:{sign}.3f}, {score.high:{sign}.3f}]"
