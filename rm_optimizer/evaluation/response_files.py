"""Files of prompts and responses, read row by row."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rm_optimizer.core.pairs.column_hints import Suggestion, odd_notes, text_hint
from rm_optimizer.core.pairs.layouts import Layout, as_yaml, require_columns
from rm_optimizer.core.pairs.source_format import FIRST_ROWS
from rm_optimizer.core.rows.columns import Columns, in_context
from rm_optimizer.core.rows.messages import (
    Prompt,
    has_messages,
    is_empty,
    read_response,
    require_characters,
    require_response,
)
from rm_optimizer.core.rows.prompts import read_prompt
from rm_optimizer.core.rows.readers import Row, each, read_rows, refusing
from rm_optimizer.errors import ConfigError, DataError

log = logging.getLogger("rm_optimizer")

REWARD = "reward"
_READ = ("prompt", "response", "responses")


class FileKind(StrEnum):
    """Formats that can be streamed; the text is how the suffix is written."""

    jsonl = ".jsonl"
    csv = ".csv"
    parquet = ".parquet"


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """One row: a prompt and its responses.

    Args:
        number: line of a text file or row of a Parquet file, from 1.
        prompt: text or messages.
        responses: one or more texts or `Turns`.
        listed: True if the row has a list under `responses`, and so gets a list of rewards.
    """

    number: int
    prompt: Prompt
    responses: tuple[str, ...]
    listed: bool


def file_kind(path: Path) -> FileKind:
    """Format of a file by its name.

    Raises:
        DataError: if the name has no known format.

    Example:
        >>> file_kind(Path("answers.jsonl.gz")).name
        'jsonl'
    """
    for kind in FileKind:
        if path.name.lower().removesuffix(".gz" if kind is FileKind.jsonl else "").endswith(kind.value):
            return kind
    raise DataError(f"{path}: expected a file name ending in .jsonl, .jsonl.gz, .csv or .parquet")


def read_responses(path: Path, layout: Layout | None = None) -> Iterator[ResponseRow]:
    """Rows of a file, checked one by one.

    Args:
        path: the file.
        layout: columns, parsed columns and encoding of the file; None reads all text as text, with a warning if it
            spells messages.

    Raises:
        DataError: naming file and row, if the file or a row cannot be read or is no prompt with responses, or if
            nothing tells how text is read that spells messages or lists.
        ConfigError: if the layout has other keys.
    """
    rows, columns = (plain_rows(path), None) if layout is None else (layout_rows(path, layout), layout.columns)
    found = each(rows, lambda row: _responses(row, columns), refusing(path))
    return (replace(row, number=number) for number, row in found)


def layout_rows(path: Path, layout: Layout) -> Iterator[tuple[int, Row]]:
    """Rows of a file under our names, with a warning if single texts spell messages.

    Raises:
        DataError: if the file or a row cannot be read, or nothing tells how text is read that spells messages or lists.
        ConfigError: if the layout has other keys than columns, parse and encoding.
    """
    if other := layout.to_dict().keys() - {"columns", "parse", "encoding"}:
        raise ConfigError(f"a layout of responses has the keys columns, parse and encoding, got {min(other)}")
    rows = stored_rows(path, layout.encoding)
    first = [*islice(rows, FIRST_ROWS)]
    require_columns(str(path), layout, [row for _, row in first])
    if hint := _hint(path, [layout.ours(layout.spelled(row)) for _, row in first], layout):
        columns = f"a layout such as {{{as_yaml({'columns': {**layout.columns, **hint.columns}})[0]}}}"
        raise DataError(f"{path}: {hint.told.replace('{options}', columns) if hint.columns else hint.text}")
    yield from each(chain(first, rows), lambda row: layout.read(layout.spelled(row), _READ), refusing(path))


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Prompts of a file with a column `prompt`; of other columns only its context is read.

    Raises:
        DataError: naming file and row, if the file or a row cannot be read or has no prompt.
    """
    return (prompt for _, prompt in each(plain_rows(path), lambda row: _prompt(row, {}), refusing(path)))


def plain_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows of a file without a layout, with a warning if most first texts spell messages or lists."""
    rows = stored_rows(path)
    first = [*islice(rows, FIRST_ROWS)]
    hint = _hint(path, [row for _, row in first], Layout())
    if hint:
        told = "spells lists or messages and is read as text; write lists as such, in JSON Lines or Parquet"
        log.warning("%s: the text in %s %s", path, ", ".join(hint.parse or hint.columns) or "a column", told)
    yield from chain(first, rows)


def _hint(path: Path, rows: Sequence[Row], layout: Layout) -> Suggestion | None:
    """Options for text that spells messages or lists in most first rows; if that is in fewer, a warning."""
    looked = [{name: row[name] for name in _READ if name in row} for row in rows]
    hint = text_hint(looked, layout)
    for note in () if hint else odd_notes(looked, layout, (("prompt",), ("response",))):
        log.warning("%s: %s", path, note)
    return hint


def stored_rows(path: Path, encoding: str | None = None) -> Iterator[tuple[int, Row]]:
    """Rows as stored; one that cannot be read raises."""
    return read_rows(path, refusing(path), encoding)


def _responses(row: Row, columns: Columns | None) -> ResponseRow:
    listed = "responses" in row
    name, kind = ("responses", "a list of texts") if listed else ("response", "text")
    if "prompt" not in row or ("response" in row) == listed:
        got = ", ".join(name or "''" for name in row) or "none"
        is_pair = {"chosen", "rejected"} <= row.keys()
        names = "responses: [chosen, rejected]" if is_pair else "prompt: NAME, response: NAME"
        told = "" if columns is None else f"; name yours by a layout such as {{columns: {{{names}}}}}"
        raise ValueError(f"expected the columns prompt and response, or prompt and responses{told}; got {got}")
    if REWARD in row:
        raise ValueError(f"there is a column '{REWARD}' already; rename it or leave it out")
    given = row[name] if listed else [row[name]]
    cells = given if isinstance(given, list) else []
    if not cells or not all(isinstance(each, str) or (isinstance(each, list) and has_messages(each)) for each in cells):
        expected = f"{name} must be {kind}, or messages that end with the assistant's"
        raise ValueError(f"{expected}, got {_shown(row[name])}")
    responses = tuple(read_response("response", response) for response in cells)
    for text in responses:
        require_response("response", text)
    return ResponseRow(0, _prompt(row, columns or {}), responses, listed)


def _prompt(row: Row, columns: Columns) -> Prompt:
    if "prompt" not in row:
        raise ValueError(f"expected the column prompt, got {', '.join(row) or 'none'}")
    if is_empty(row["prompt"]):
        raise ValueError(f"prompt must be non-empty text or a list of {{role, content}}, got {_shown(row['prompt'])}")
    if isinstance(row["prompt"], str):
        require_characters("prompt", row["prompt"])
    return in_context(row, read_prompt(row["prompt"]), columns)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
