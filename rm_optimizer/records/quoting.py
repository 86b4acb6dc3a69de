"""Escaping of text so that the grammars of Hydra and Markdown read it back unchanged. Imports no Hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence


def shell_word(text: str) -> str:
    """Text as one word of a POSIX shell, as readable as it can be.

    Example:
        >>> print(shell_word("a=b"), shell_word("a='b c'"), shell_word("a=$b"))
        a=b "a='b c'" 'a=$b'
    """
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


def in_quotes(text: str) -> str:
    r"""Text in single quotes that Hydra's grammar reads back unchanged.

    Example:
        >>> print(in_quotes("it's"))
        'it\'s'
    """
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"


def markdown_line(text: str) -> str:
    """Text on one line, escaped so that Markdown does not read it as HTML.

    Example:
        >>> markdown_line("one" + chr(10) + "<b>")
        'one &lt;b>'
    """
    return " ".join(text.split()).replace("<", "&lt;")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table in Markdown.

    Args:
        head: names of the columns.
        rows: cells as text; a bar in one is escaped.

    Example:
        >>> print(markdown_table(("name", "value"), [("a|b", "1")]))
        | name | value |
        | --- | --- |
        | a\|b | 1 |
    """
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(markdown_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
