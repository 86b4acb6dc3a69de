"""Column mapping: the rows of a source under our column names, and the numbers in their cells."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rm_optimizer.core.rows.messages import is_message
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import DataError, did_you_mean
from rm_optimizer.schema.data import Spelling

Columns = Mapping[str, str | None]
"""Our column name to the file's; None leaves the file's column of that name out."""
_CONVERSATIONS = ("chosen", "rejected", "response_a", "response_b")
_LISTS = ("responses", "scores", "ranks")


def first_renamed(
    first: Sequence[tuple[int, Row]], path: str, columns: Columns, spelling: Spelling
) -> list[tuple[int, Row]]:
    """The first rows of a source under our column names, once the columns of the mapping are known to be there.

    Args:
        first: the first rows, numbered.
        path: the source as it was named.
        columns: column mapping.
        spelling: form of option names in messages.

    Raises:
        DataError: if they lack a column of the mapping, or a part of one; naming the option and what is there.
    """
    numbered = list(renamed(first, columns))
    _require_columns([row for _, row in first], path, columns, spelling)
    return numbered


def renamed(rows: Iterable[tuple[int, Row]], columns: Columns) -> Iterator[tuple[int, Row]]:
    """The rows under our column names; columns without one of ours keep theirs.

    A name such as `answer.text` reads inside objects, and the same part of each object of a list. Lists and messages
    that stand as JSON text in their cell, as in CSV, are parsed.
    """
    for number, row in rows:
        yield number, _parsed(_mapped(row, columns) if columns else row)


def _mapped(row: Row, columns: Columns) -> Row:
    consumed = {theirs if theirs in row else _root(theirs) for theirs in columns.values() if theirs is not None}
    consumed |= {ours for ours, theirs in columns.items() if theirs is None}
    kept = {name: value for name, value in row.items() if name not in consumed}
    found = ((ours, theirs) for ours, theirs in columns.items() if theirs is not None and _has_root(row, theirs))
    return kept | {ours: cell(row, theirs) for ours, theirs in found}


def _root(path: str) -> str:
    return path.partition(".")[0]


def _has_root(row: Row, path: str) -> bool:
    return path in row or _root(path) in row


def cell(row: Row, path: str) -> Any:
    """The value at a column name or at a path into a column; None where the path leads nowhere.

    Example:
        >>> cell({"answers": [{"text": "a"}, {"text": "b"}]}, "answers.text")
        ['a', 'b']
    """
    if path in row:
        return row[path]
    name, *steps = path.split(".")
    value: Any = row.get(name)
    for step in steps:
        value = _inside(value, step)
    return value


def read_number(name: str, value: object) -> float:
    """A finite number from a cell, which may be text as in CSV.

    Raises:
        ValueError: if it is none; the text names the column.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _inside(value: Any, step: str) -> Any:
    if isinstance(value, str):
        value = _json(value)
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, list) and step.lstrip("-").isdigit():
        index = int(step)
        return value[index] if -len(value) <= index < len(value) else None
    return [_inside(item, step) for item in value] if isinstance(value, list) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed(row: Row) -> Row:
    changed: Row = {}
    for name in _CONVERSATIONS:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            messages = _json(value)
            if isinstance(messages, list) and all(map(is_message, messages)) and messages:
                changed[name] = messages
            elif is_message(messages):
                changed[name] = [messages]
        elif is_message(value):
            changed[name] = [value]
    for name in _LISTS:
        value = row.get(name)
        if isinstance(value, str) and isinstance(items := _json(value), list):
            changed[name] = items
    return row | changed if changed else row


def _require_columns(first: Sequence[Row], path: str, columns: Columns, spelling: Spelling) -> None:
    known = list(dict.fromkeys(name for row in first for name in row))
    for ours, theirs in columns.items():
        name = ours if theirs is None else theirs
        if name in known or not all(_is_missing(cell(row, name)) for row in first):
            continue
        parts = ", ".join(_parts(row.get(_root(name)) for row in first)) or "no parts"
        lost = f"the column {_root(name)} holds no such part; it has {parts}"
        reason = lost if _root(name) in known else did_you_mean("column", name, known)
        option = spelling.columns({ours: "null" if theirs is None else theirs})
        raise DataError(f"{path}: {option}: {reason}")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_missing, value)))


def _parts(values: Iterable[Any]) -> list[str]:
    """Names of the parts of objects, or of lists of objects."""
    names: dict[str, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                names |= dict.fromkeys(map(str, item))
    return list(names)
