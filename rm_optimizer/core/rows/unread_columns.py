"""Columns that are not read, which a user may take for a part of the prompt or for the preference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rm_optimizer.core.rows.columns import UNREAD_COLUMNS
from rm_optimizer.core.rows.messages import parsed_text
from rm_optimizer.core.rows.readers import Row
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
_OF_SCORES = re.compile(r"score|rating|reward|rank|vote|win|prefer", re.IGNORECASE)
_OF_PREFERENCES = re.compile(r"winner|prefer|choice|better|verdict|label|vote", re.IGNORECASE)
_OF_CHOSEN = re.compile(r"chosen|better|best|prefer|accept|positive|correct|good|win|_w$", re.IGNORECASE)
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


def contrary_notes(
    path: str, sides: tuple[str, str], pairs: Sequence[tuple[Mapping[str, Any], float]]
) -> Iterator[str]:
    """Sentences on unread columns by which the other response is the better one.

    These are scores of both sides, and columns whose values name a side. If the names of the sides tell nothing, such
    as `left` and `right`, a column that may name the better one by values of its own is named as well.

    Args:
        path: the source as it was named.
        sides: names of the columns that are read as chosen and rejected.
        pairs: the unread columns of each pair, and the probability that chosen is the better response.
    """
    decided = [(row, 1 if label > 0.5 else -1) for row, label in pairs if label != 0.5]
    names = dict.fromkeys(name for row, _ in decided for name in row)
    words = [re.findall(r"[A-Za-z]+|\d+", side) for side in sides]
    differing = [both for both in zip(*words, strict=False) if both[0] != both[1]]
    seconds = set[str | None]()
    marks = [("chosen", "rejected"), *(differing if len(differing) == 1 else [])]
    for name in names:
        others = [_exchanged(name, *both) for both in marks] if _OF_SCORES.search(name) else []
        other = next((each for each in others if each != name and each in names), None)
        seconds.add(other)
        told = [*marks, sides] if _OF_PREFERENCES.search(name) else [sides]
        found = [
            sign * (_named(row.get(name), told) if other is None else _gap(row, name, other)) for row, sign in decided
        ]
        against, among = sum(value < 0 for value in found), sum(abs(value) > 0 for value in found)
        values = sorted({str(row[name]) for row, _ in decided if isinstance(row.get(name), str | int)})
        if against:
            by = name if other is None else f"{name} beside {other}"
            said = f"{by} prefers the other response in {against} of {among} pairs"
            yield f"{path}: {said} and is not read: are the columns swapped, or is it the winner of two responses?"
        elif (
            not among
            and name not in seconds
            and len(told) > 1
            and 1 < len(values) < 9
            and not _OF_CHOSEN.search(sides[0])
        ):
            said = f"{name}, which holds {', '.join(values)}, may name the better of {' and '.join(sides)}"
            yield f"{path}: {said} and is not read: map it as the winner of response_a and response_b, or to null"


def _exchanged(name: str, first: str, second: str) -> str:
    """The name with the word of the second side in place of the first's."""
    edge = r"\d" if first.isdigit() else "[A-Za-z]"
    return re.sub(rf"(?<!{edge}){re.escape(first)}(?!{edge})", second, name)


def _gap(row: Mapping[str, Any], first: str, second: str) -> float:
    """Number of the first column minus that of the second, for ranks with the sign turned; 0 where one is none."""
    try:
        gap = float(row[first]) - float(row[second])
    except (KeyError, TypeError, ValueError):
        return 0.0
    return -gap if "rank" in first.lower() else gap


def _named(value: Any, sides: Sequence[tuple[str, str]]) -> int:
    """1 for a value that names the first of two sides, -1 for the second, and 0 for any other."""
    text = str(value).casefold()
    names = (text, (re.findall(r"[^\W_]+", text) or [""])[-1])
    first, second = (any(side[i].casefold() in names for side in sides) for i in (0, 1))
    return first - second


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
    """The texts in a cell, those inside its lists and objects too, which may be written as text."""
    if isinstance(value, str) and isinstance(parsed := parsed_text(value), list | dict):
        yield from _texts(parsed)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
