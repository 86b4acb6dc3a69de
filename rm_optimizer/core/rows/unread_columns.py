"""Columns that look like content and are not read, which a user may take for a part of the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rm_optimizer.core.rows.readers import Row
from rm_optimizer.core.rows.row_context import UNREAD_COLUMNS
from rm_optimizer.schema.data import Spelling

_WORD = re.compile(r"[^\W\d_]{2,}")
_OF_PROMPTS = re.compile(
    r"persona|profile|context|document|passage|instruction|background|scenario|knowledge|evidence|article|story|"
    r"reference|rubric|constraint|system|history",
    re.IGNORECASE,
)
_OF_METADATA = re.compile(
    r"(^|[_ .-])(ids?|type|kind|source|category|class|name|title|url|lang|language|length|count|score|label|split|"
    r"subset|model|date|time|hash|licen[sc]e|copyright|citation|author|version)$",
    re.IGNORECASE,
)
_LONG = 80
"""Characters from which a text is content although other rows repeat it."""
_SENTENCE = 5
"""Words from which a text that few rows share is content."""


def unread_note(path: str, rows: Sequence[Row], read: frozenset[str], spelling: Spelling) -> str | None:
    """A sentence that names the columns of text that no format reads; None if there are none.

    Ids, sources, numbers and short text of few values are metadata. A text that also stands in a column that is read is
    not lost.

    Args:
        path: the source as it was named.
        rows: its first rows under our column names.
        read: columns that are read.
        spelling: form of option names in messages.
    """
    texts_read = ["\0".join(_folded(text) for name in read for text in _texts(row.get(name))) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row)
    passed = {*read, *UNREAD_COLUMNS, "metadata"}
    unread = [name for name in names if name not in passed and _is_content(name, rows, texts_read)]
    if not unread:
        return None
    option = spelling.columns(dict.fromkeys(unread, "null"))
    return (
        f"{path}: {', '.join(unread)} look like content but are not read; write into the prompt what the responses "
        f"answer to, or leave such columns out with {option}"
    )


def _is_content(name: str, rows: Sequence[Row], texts_read: Sequence[str]) -> bool:
    found = [max(_texts(row.get(name)), key=len, default="") for row in rows]
    texts = [text for text in found if text.strip()]
    lost = [
        text
        for text, others in zip(found, texts_read, strict=True)
        if text.strip() and not (_folded(text) and _folded(text) in others)
    ]
    if not lost or len(lost) < len(texts) / 2:
        return False
    is_metadata = _OF_METADATA.search(name) is not None
    if _OF_PROMPTS.search(name) and not is_metadata:
        return median(len(text.split()) for text in lost) > 1
    if median(len(_WORD.findall(text)) for text in lost) < _SENTENCE:
        return False
    if median(map(len, lost)) >= _LONG:
        return True
    return not is_metadata and len(set(lost)) > len(lost) / 2


def _texts(value: Any) -> Iterator[str]:
    """The texts in a cell, those inside its lists and objects too, which may be JSON text."""
    if isinstance(value, str) and isinstance(parsed := _parsed(value), list | dict):
        yield from _texts(parsed)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
