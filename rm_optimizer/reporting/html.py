"""Parts of an HTML page.

All text is escaped, pictures are embedded, and colors follow the reader's system.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from html import escape as _escape
from importlib.resources import files

import matplotlib
from matplotlib.figure import Figure

from rm_optimizer.reporting.figures import DPI, GRAY, INK, LIGHT, SVG_STYLE, described

_LARGEST_SVG = 300_000
"""Largest SVG in bytes; a larger figure is embedded as pixels."""
_PAGE_COLORS = {"ink": f"{INK}|#000000", "soft": GRAY, "line": LIGHT, "paper": "#ffffff"}
"""Patterns of the colors in a figure that follow the page, by their names in the page's style."""
_STYLE = files("rm_optimizer.reporting").joinpath("page.css").read_text(encoding="utf-8")


_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change the direction of the text around them."""


def escape(text: str) -> str:
    r"""Text for a page; bytes that are not UTF-8 and marks of direction are shown as escape sequences.

    Example:
        >>> escape("<b>" + chr(0x202E))
        '&lt;b&gt;\\u202e'
    """
    shown = text.encode("utf-8", "backslashreplace").decode()
    return _escape(_DIRECTION.sub(lambda mark: f"\\u{ord(mark[0]):04x}", shown))


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: its title, as text.
        parts: its content, as HTML; empty parts are left out.
    """
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>\n{_STYLE}</style></head>\n<body><main>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A section with a heading; empty if all its parts are empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>" if content else ""


def answer(tone: str, headline: str, *sentences: str) -> str:
    """The main result in large type; sentences get a capital and a full stop.

    Args:
        tone: `good`, `fair`, `bad` or `open`.
        headline: a few words.
        sentences: meaning in sentences.
    """
    text = "".join(paragraph(sentence(each)) for each in sentences)
    return f'<div class="answer {tone}"><strong>{escape(headline)}</strong>{text}</div>'


def sentence(text: str) -> str:
    """The text with a capital at the start and a full stop.

    A name before a colon does not change.

    Example:
        >>> sentence("few seeds"), sentence("adamw: few seeds")
        ('Few seeds.', 'adamw: few seeds.')
    """
    opening = text if text.partition(" ")[0].endswith(":") else f"{text[:1].upper()}{text[1:]}"
    return opening if text.endswith(".") else f"{opening}."


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{escape(text)}</p>"


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names its rows; wide ones scroll on their own.

    Args:
        caption: content of the table.
        head: names of the columns; all empty leaves the head out.
        rows: cells as text.
    """
    names = "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in head)
    lines = (
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    heading = f"<thead><tr>{names}</tr></thead>" if any(head) else ""
    body = f"<caption>{escape(caption)}</caption>{heading}<tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>{body}</table></div>'


def details(summary: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def code(text: str) -> str:
    """Preformatted lines."""
    return f"<pre>{escape(text)}</pre>"


def figures(*parts: str) -> str:
    """Figures side by side if there is room."""
    shown = "".join(part for part in parts if part)
    return f'<div class="figures">{shown}</div>' if shown else ""


def drawn(figure: Figure, caption: str) -> str:
    """A figure inside the page, in the page's colors; equal figures give equal bytes.

    Its alternative text is the caption, followed by axes, ranges and numbers.

    Args:
        figure: the figure.
        caption: content in one sentence.
    """
    alt = f"{sentence(caption)} {described(figure)}"
    stream = io.BytesIO()
    with matplotlib.rc_context(SVG_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    if stream.tell() > _LARGEST_SVG:
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
        data = base64.b64encode(stream.getvalue()).decode("ascii")
        return _captioned(f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">', caption)
    has_color_map = any(  # colors represent numbers, with text in black or white over them
        axes.images or any(each.get_array() is not None for each in axes.collections) for axes in figure.axes
    )
    svg = stream.getvalue().decode()
    body = svg[svg.index("<defs>", svg.index("</metadata>")) :].replace("\n", " ")  # without references to addresses
    for name, color in () if has_color_map else _PAGE_COLORS.items():
        body = re.sub(color, f"var(--{name})", body, flags=re.IGNORECASE)
    body = re.sub(r' id="(?:[a-z]+_)+\d+"', "", body)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    kind = "drawing fixed" if has_color_map else "drawing"
    label = f'role="img" aria-label="{escape(alt)}" viewBox="0 0 {width} {height}"'
    return _captioned(f'<svg class="{kind}" {label}>{body}', caption)


def _captioned(image: str, caption: str) -> str:
    label = f'role="group" aria-label="{escape(caption)}" tabindex="0"'
    return f'<figure><div {label} class="wide">{image}</div><figcaption>{escape(caption)}</figcaption></figure>'
