"""Columns of rows: their mapping to our names, the numbers in their cells, and those that belong to the prompt."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rm_optimizer.core.rows.messages import (
    Message,
    Prompt,
    are_texts,
    as_messages,
    is_assistant,
    is_empty,
    is_message,
    parsed_text,
    read_prompt,
)
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import DataError, did_you_mean
from rm_optimizer.schema.data import Spelling

CONTEXT_COLUMNS = frozenset({"system", "input"})
"""Columns that are read into the prompt."""
UNREAD_COLUMNS = frozenset({
    "tools", "functions", "tool_calls", "chat_template_kwargs", "documents", "history", "context", "system_prompt",
    "system_message", "input", "image", "images", "audio", "audios", "video", "videos",
})  # fmt: skip
"""Columns that would change what the model reads, and that are not read unless they are mapped."""


def row_prompt(row: Row) -> Prompt:
    """The prompt of a row with its `system` and `input` columns.

    Raises:
        ValueError: if the prompt is none, or a column beside it would be lost.
    """
    return in_context(row, read_prompt(row.get("prompt")), {})


def in_context(row: Row, prompt: Prompt, columns: Mapping[str, str | None]) -> Prompt:
    r"""The prompt with a row's system turn in front and its instruction's input behind.

    The input follows the instruction after a line break, as data sets of Alpaca's form (Taori et al., 2023) are read
    by LLaMA-Factory. It is read where `columns` maps it, or maps `prompt` to `instruction`.

    Raises:
        ValueError: if a column would be lost, or the system turn contradicts the prompt's own.

    Example:
        >>> in_context({"system": "Be brief."}, "Why?", {})
        (Message(role='system', content='Be brief.'), Message(role='user', content='Why?'))
        >>> in_context({"input": "1, 2, 3"}, "Add these.", {"prompt": "instruction"})
        'Add these.\n1, 2, 3'
    """
    lost = unread_column(row, columns)
    if lost is not None:
        raise ValueError(f"{lost} is not read and would be lost; write it into the prompt, or leave the column out")
    has_input, has_system = (not is_empty(row.get(name)) for name in ("input", "system"))
    if has_input:
        prompt = _with_input(prompt, _text_of(row, "input"))
    return _with_system(prompt, _text_of(row, "system")) if has_system else prompt


def is_context(name: str) -> bool:
    """True for the name of a column, or of a part of an object, that belongs to what the model reads."""
    return name in CONTEXT_COLUMNS or name in UNREAD_COLUMNS


def unread_column(row: Row, columns: Mapping[str, str | None]) -> str | None:
    """First column of a row with context that the model would not read; None if there is none.

    A part of an object, which has its path for name, is judged by the last word of it, and other messages of a
    conversation are context as well.
    """
    reads_input = "input" in columns or columns.get("prompt") == "instruction"
    for name, value in row.items():
        outer, _, last = name.rpartition(".")
        if outer and not is_empty(value) and (is_context(last) or is_message(value)):
            return name
        if name in UNREAD_COLUMNS and not is_empty(value) and not (name == "input" and reads_input):
            return name
    return None


def _text_of(row: Row, name: str) -> str:
    value: Any = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {json.dumps(value, default=str)[:60]}")
    return value


def _with_input(prompt: Prompt, text: str) -> Prompt:
    if not isinstance(prompt, str):
        raise ValueError("input follows an instruction that is text, but the prompt is a list of messages")
    return f"{prompt}\n{text}"


def _with_system(prompt: Prompt, text: str) -> Prompt:
    messages = as_messages(prompt)
    if messages and messages[0].role == "system":
        if messages[0].content.split() != text.split():
            raise ValueError("the system column says otherwise than the prompt's own system message; leave one out")
        return prompt
    return (Message("system", text), *messages)


Columns = Mapping[str, str | None]
"""Our column name to the file's; None leaves the file's column of that name out."""
_SIDES = (("chosen", "rejected"), ("response_a", "response_b"))
_LISTS = ("responses", "scores", "ranks")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")
"""Begin of a text that looks like a list of messages in some notation."""


def renamed(
    rows: Iterable[tuple[int, Row]], columns: Columns, structured: frozenset[str] = frozenset()
) -> Iterator[tuple[int, Row]]:
    """The rows under our column names; columns without one of ours keep theirs.

    A name such as `answer.text` reads inside objects, and the same part of each object of a list. What lies beside it
    becomes a column with its path for name.

    Args:
        rows: numbered rows.
        columns: column mapping.
        structured: columns of responses whose text is read as the list that it spells, as `structured_columns` finds
            them. Lists of responses and scores always are.
    """
    for number, row in rows:
        yield number, _parsed(_mapped(row, columns) if columns else row, structured)


def _mapped(row: Row, columns: Columns) -> Row:
    consumed = {theirs if theirs in row else _root(theirs) for theirs in columns.values() if theirs is not None}
    consumed |= {ours for ours, theirs in columns.items() if theirs is None}
    kept = {name: value for name, value in row.items() if name not in consumed}
    found = ((ours, theirs) for ours, theirs in columns.items() if theirs is not None and _has_root(row, theirs))
    mapped = {ours: cell(row, theirs) for ours, theirs in found}
    return kept | dict(_beside(row, columns, mapped.values())) | mapped


def _beside(row: Row, columns: Columns, read: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Path and value of what mapped paths pass by and nothing reads; of a message, only if its text is not read."""
    paths = {ours if theirs is None else theirs for ours, theirs in columns.items()}
    passed = [path.split(".") for path in paths if "." in path and path not in row]
    texts = [value for value in read if isinstance(value, str)]
    for prefix in dict.fromkeys(".".join(steps[:end]) for steps in passed for end in range(1, len(steps))):
        if any(f"{prefix}.".startswith(f"{path}.") for path in paths):
            continue
        outer = cell(row, prefix)
        for names, value in _members(parsed_text(outer) if isinstance(outer, str) else outer, prefix, paths):
            inner = [f"{prefix}.{name}." for name in names]
            is_read = any(f"{path}.".startswith(tuple(inner)) for path in paths)
            if not is_read and not (is_message(value) and value.get("content", value.get("value")) in texts):
                yield inner[0][:-1], value


def _members(outer: Any, prefix: str, paths: Iterable[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Names and value of each part of an object and each item of a list; context only, of a list that is read whole."""
    if isinstance(outer, Mapping):
        yield from (((str(name),), value) for name, value in outer.items() if not is_empty(value))
    elif isinstance(outer, list) and any(re.match(rf"{re.escape(prefix)}\.-?\d", path) for path in paths):
        yield from (((str(index), str(index - len(outer))), value) for index, value in enumerate(outer))
    elif isinstance(outer, list):
        items = [item for item in outer if isinstance(item, Mapping)]
        for name in dict.fromkeys(name for item in items for name in item if is_context(str(name))):
            values = [item.get(name) for item in items]
            if not all(map(is_empty, values)):
                yield (str(name),), values


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
        value = parsed_text(value)
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, list) and step.lstrip("-").isdigit():
        index = int(step)
        return value[index] if -len(value) <= index < len(value) else None
    return [_inside(item, step) for item in value] if isinstance(value, list) else None


def _parsed(row: Row, structured: frozenset[str]) -> Row:
    changed: Row = {}
    for name in (*_SIDES[0], *_SIDES[1], *_LISTS):
        value = row.get(name)
        if isinstance(value, str) and (name in structured or name in _LISTS):
            value = parsed_text(value)
        if is_message(value):
            value = [value]
        if isinstance(value, list) and value is not row[name]:
            changed[name] = value
    return row | changed if changed else row


def structured_columns(path: str, rows: Sequence[Row], named_format: str) -> tuple[frozenset[str], list[str]]:
    """Columns of responses whose text spells messages, or lists if the format is named so; and sentences on such text.

    A column is read as one kind of thing, that of most of its first cells, so that an answer in JSON stays text among
    other text. Messages must stand on both sides.

    Args:
        path: the source as it was named.
        rows: its first rows under our names.
        named_format: value of the option `format`.

    Raises:
        DataError: if text looks like lists of messages and cannot be read, or prompts are lists of texts.
    """
    kinds = {
        name: Counter(_kind(row[name]) for row in rows if not is_empty(row.get(name)))
        for name in ("prompt", *_SIDES[0], *_SIDES[1])
    }
    most = {name: max(counts, key=counts.__getitem__, default="") for name, counts in kinds.items()}
    if lost := next((name for name, kind in most.items() if kind == "unreadable"), None):
        raise DataError(
            f"{path}: {lost} holds lists of messages as text that cannot be read; write the file as JSON Lines or "
            "Parquet, where lists stay lists"
        )
    if most["prompt"] in ("texts", "list"):
        first = {name: f"{name}.0" for name, counts in kinds.items() if counts}
        raise DataError(
            f"{path}: prompt holds lists of texts, one for each turn; read the first turn with "
            f"{Spelling.current().columns(first)}, or write conversations as messages"
        )
    found, notes = set[str](), list[str]()
    for names in _SIDES:
        odd, listed = sum(kinds[name]["messages"] for name in names), [name for name in names if most[name] == "texts"]
        if {most[name] for name in names} == {"messages"} and named_format in ("auto", "messages", "winner"):
            found.update(names)
            notes.append(f"{path}: {', '.join(names)} hold messages written as text, which are read as messages")
        elif odd:
            cells = f"{odd} of {sum(kinds[name].total() for name in names)} cells of {', '.join(names)}"
            notes.append(f"{path}: {cells} look like messages and are read as text")
        if named_format == "lists":
            found.update(listed)
        elif listed:
            notes.append(
                f"{path}: {' and '.join(listed)} holds lists of texts written as text, which are read as text; "
                f"{Spelling.current().option('format', 'lists')} reads each as several responses"
            )
    return frozenset(found), notes


def _kind(value: Any) -> str:
    """Kind of a cell: text that spells messages or texts or looks like messages that cannot be read, a list, other."""
    if not isinstance(value, str):
        return "list" if are_texts(value) else "other"
    parsed = parsed_text(value)
    if is_assistant(parsed) or (isinstance(parsed, list) and parsed and all(map(is_message, parsed))):
        return "messages"
    if parsed is None and _MESSAGES.match(value):
        return "unreadable"
    return "texts" if are_texts(parsed) else "other"


def require_columns(path: str, rows: Sequence[Row], columns: Columns) -> None:
    """Refuse a mapping of columns, or of parts of columns, that the rows lack.

    Args:
        path: the source as it was named.
        rows: its first rows as they are stored.
        columns: column mapping.

    Raises:
        DataError: naming the option and the columns or parts that are there.
    """
    known = list(dict.fromkeys(name for row in rows for name in row))
    for ours, theirs in columns.items():
        name = ours if theirs is None else theirs
        is_there = (_root(name) if theirs is None else name) in known
        if is_there or not all(_is_missing(cell(row, name)) for row in rows):
            continue
        parts = ", ".join(_parts(row.get(_root(name)) for row in rows)) or "no parts"
        lost = f"the column {_root(name)} holds no such part; it has {parts}"
        reason = lost if _root(name) in known else did_you_mean("column", name, known)
        option = Spelling.current().columns({ours: "null" if theirs is None else theirs})
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
