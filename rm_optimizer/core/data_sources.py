"""From what `data.train` and `data.val` name to preference pairs: sources, column mapping, bad rows and mixing."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rm_optimizer.core.base import PreferencePair
from rm_optimizer.core.formats import (
    FORMATS,
    Comparison,
    RowFormat,
    detect_format,
    gather_responses,
    read_number,
    row_format,
)
from rm_optimizer.core.packing import random_positions
from rm_optimizer.core.readers import Report, Row, read_rows, row_unit, source_name
from rm_optimizer.core.row_context import CONTEXT_COLUMNS, in_context
from rm_optimizer.errors import ConfigError, DataError, did_you_mean
from rm_optimizer.schema.data import KwiseRule, OnBadRow

FIRST_ROWS = 50
"""Rows that decide the format and the columns."""
_OPTIONAL = ("margin", "label", "weight")
_OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "context"),
    "chosen": ("better", "winner", "preferred", "accepted", "positive", "response_chosen", "answer_chosen"),
    "rejected": ("worse", "loser", "dispreferred", "negative", "response_rejected", "answer_rejected"),
    "responses": ("completions", "answers", "candidates"),
    "scores": ("rewards", "ratings", "ranks"),
}
"""What other data sets call our columns, for the hint only."""


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that gave no pair.

    Args:
        path: the source as it was named.
        row: its number: the line in JSON Lines and CSV, the row in others, from 1.
        reason: why it gave none.
    """

    path: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {row_unit(self.path)} {self.row}: {self.reason}"


@dataclass(frozen=True)
class DataSource:
    """One file or data set and how to read it.

    Args:
        path: a file, a saved `datasets` folder or a hub name.
        weight: its share in a mixture: each pair counts `weight` times; a fraction takes a random part.
        format: a row format's name, or "auto".
        columns: column mapping, our name to the file's; other names are kept under ours in the metadata.
        label: the preference probability of rows that carry none, 0.5 for a file of ties.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """

    path: str
    weight: float = 1.0
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    label: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"the weight of source {self.path} must be positive, got {self.weight}")
        if not 0 <= self.label <= 1:
            raise ConfigError(f"the label of source {self.path} must lie in [0, 1], got {self.label}")
        if self.format != "auto":
            row_format(self.format)
        ours = {name for form in FORMATS.values() for name in form.columns} | {
            "response",
            "score",
            *_OPTIONAL,
            *CONTEXT_COLUMNS,
        }
        for name in self.columns:
            if name not in ours and difflib.get_close_matches(name, ours, n=1, cutoff=0.8):
                raise ConfigError(f"data.columns: {did_you_mean('column of ours', name, ours)}")


@dataclass(frozen=True)
class SourcePairs:
    """The pairs of a source in the order of its rows, and the rows that gave none."""

    pairs: tuple[PreferencePair, ...]
    skipped: tuple[SkippedRow, ...]


def parse_sources(source: object, *, format: str, columns: Mapping[str, str] | None) -> tuple[DataSource, ...]:
    """The sources that an option names: a path or hub name, a mapping with `path`, or a list of these.

    Args:
        source: the option's value.
        format: row format of sources that do not name their own.
        columns: column mapping of sources that do not bring their own.

    Raises:
        ConfigError: if it names none, or an option of a source is unknown or has the wrong type.

    Example:
        >>> sources = parse_sources(["a.csv", {"path": "b.csv", "weight": 2}], format="auto", columns={})
        >>> [source.weight for source in sources]
        [1.0, 2.0]
    """
    items = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if not items:
        raise ConfigError("a data source must name a file or data set, got an empty list")
    return tuple(_parse_source(item, format, columns or {}) for item in items)


def _parse_source(item: object, format: str, columns: Mapping[str, str]) -> DataSource:
    options: Mapping[str, Any] = item if isinstance(item, Mapping) else {"path": item}
    known = DataSource.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(did_you_mean("option of a data source", str(name), known))
    path = options.get("path")
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"a data source must be a path, a data-set name or {{path: …}}, got {item!r}")
    values = {"format": format, "columns": columns, **options, "path": str(path)}
    for name in ("weight", "label"):
        if name in values:
            try:
                values[name] = read_number(name, values[name])
            except ValueError as error:
                raise ConfigError(f"data source {path}: {error}") from error
    return DataSource(**values)


def load_source(source: DataSource, *, kwise_rule: KwiseRule, on_bad_row: OnBadRow) -> SourcePairs:
    """Read every pair of one source.

    Args:
        source: what to read and how.
        kwise_rule: which pairs a row of many scored responses gives.
        on_bad_row: stop at the first bad row, or drop and list them. A k-wise row without two different scores is not
            bad; it gives no pair and is listed either way.

    Raises:
        DataError: if the source cannot be read, its columns fit no format, a row is bad, or no pair is left.
    """
    skipped: list[SkippedRow] = []

    def report(number: int, reason: str) -> None:
        skipped.append(SkippedRow(source.path, number, reason))
        if on_bad_row == OnBadRow.error:
            raise DataError(f"{skipped[-1]}; correct it, or set data.on_bad_row=drop to leave bad rows out")

    rows = read_rows(source.path, report)
    first = list(itertools.islice(rows, FIRST_ROWS))
    if not first:
        raise DataError(_nothing_left(source, skipped))
    form = format_of(source, [row for _, row in first])
    numbered: Iterable[tuple[int, Row]] = renamed(itertools.chain(first, rows), source.columns)
    if has_one_response_a_row(source, form, first[0][1]):
        numbered = gather_responses(numbered, report)

    def skip(number: int, reason: str) -> None:
        skipped.append(SkippedRow(source.path, number, reason))

    pairs = tuple(pair for _, pair in numbered_pairs(source, form, numbered, kwise_rule, report=report, skip=skip))
    if not pairs:
        raise DataError(_nothing_left(source, skipped))
    return SourcePairs(pairs, tuple(skipped))


def has_one_response_a_row(source: DataSource, form: RowFormat, first: Row) -> bool:
    """Whether rows of the k-wise format are single responses, which must be gathered by prompt."""
    return form.name == "kwise" and "responses" not in first and "responses" not in source.columns


def numbered_pairs(
    source: DataSource,
    form: RowFormat,
    rows: Iterable[tuple[int, Row]],
    kwise_rule: KwiseRule,
    *,
    report: Report,
    skip: Report,
) -> Iterator[tuple[int, PreferencePair]]:
    """The pairs of rows, each with the number of its row.

    Args:
        source: where the rows come from.
        form: their format.
        rows: numbered rows under our column names.
        kwise_rule: which pairs a row of many scored responses gives.
        report: told of bad rows.
        skip: told of rows that are not bad and give no pair.
    """
    maker = _PairMaker(source, form)
    for number, row in rows:
        try:
            comparisons = form.compare(row, kwise_rule)
            pairs = maker.pairs(number, row, comparisons)
        except ValueError as error:
            report(number, str(error))
            continue
        if not comparisons:
            skip(number, "no pair: no two responses with different scores")
        yield from ((number, pair) for pair in pairs)


def _nothing_left(source: DataSource, skipped: Sequence[SkippedRow]) -> str:
    if not skipped:
        return f"{source.path}: the file holds no rows"
    return f"none of {len(skipped)} rows gives a pair; the first: {skipped[0]}"


def renamed(rows: Iterable[tuple[int, Row]], columns: Mapping[str, str]) -> Iterator[tuple[int, Row]]:
    """The rows under our column names; columns without one of ours keep theirs."""
    theirs = set(columns.values())
    for number, row in rows:
        if columns:
            kept = {name: value for name, value in row.items() if name not in theirs}
            row = kept | {ours: row[name] for ours, name in columns.items() if name in row}
        yield number, row


def format_of(source: DataSource, first: Sequence[Row]) -> RowFormat:
    """The format named or detected, once the columns are known to be there.

    Raises:
        DataError: if the first rows lack a column, or look like no format.
    """
    known = list(dict.fromkeys(name for row in first for name in row))
    for name in source.columns.values():
        if name not in known:
            raise DataError(f"{source.path}: data.columns: {did_you_mean('column', name, known)}")
    ours = [row for _, row in renamed(enumerate(first), source.columns)]
    columns = list(dict.fromkeys(name for row in ours for name in row))
    if source.format == "auto":
        found = detect_format(ours)
        if found is None:
            raise DataError(_no_format(source.path, columns, FORMATS.values()))
        return found
    form = row_format(source.format)
    if not any(set(columns) >= names for names in form.required):
        raise DataError(_no_format(source.path, columns, [form]))
    return form


def _no_format(path: str, columns: Sequence[str], forms: Iterable[RowFormat]) -> str:
    looked_for = "; or ".join(f"{form.expects} ({form.name})" for form in forms)
    return f"{path}: expected {looked_for}; got columns {', '.join(columns)}; {_mapping_hint(columns)}"


def _mapping_hint(columns: Sequence[str]) -> str:
    """How to map columns, guessed from names that are like ours or that others use."""
    guesses = {ours: _guess(ours, others, columns) for ours, others in _OTHER_NAMES.items() if ours not in columns}
    found = {ours: theirs for ours, theirs in guesses.items() if theirs is not None}
    if not found:
        return "name yours as data.columns={prompt: …, chosen: …, rejected: …}"
    mapping = ", ".join(f"{ours}: {theirs}" for ours, theirs in found.items())
    return f"did you mean data.columns={{{mapping}}}?"


def _guess(ours: str, others: Sequence[str], columns: Sequence[str]) -> str | None:
    free = [name for name in columns if name not in _OTHER_NAMES]
    by_lower = {name.lower(): name for name in free}
    near = [name for name in others if name in by_lower]
    near = near or difflib.get_close_matches(ours, list(by_lower), n=1, cutoff=0.7)
    return by_lower[near[0]] if near else None


class _PairMaker:
    """Makes pairs of the comparisons of a source's rows."""

    def __init__(self, source: DataSource, form: RowFormat) -> None:
        self._name = source_name(source.path)
        self._label = source.label
        self._columns = source.columns
        self._is_kwise = form.name == "kwise"
        self._own = form.columns | set(_OPTIONAL) | CONTEXT_COLUMNS

    def pairs(self, number: int, row: Row, comparisons: Sequence[Comparison]) -> list[PreferencePair]:
        """The row's pairs; raises `ValueError` with the reason if the row is bad."""
        margin, label, weight = (_optional(row, name) for name in _OPTIONAL)
        shared = self._metadata(number, row)
        return [
            PreferencePair(
                in_context(row, item.prompt, self._columns),
                item.chosen,
                item.rejected,
                margin=margin if margin is not None else item.margin,
                metadata=shared | _kept(item.extra.items()),
                label=self._label if label is None else label,
                weight=1.0 if weight is None else weight,
            )
            for item in comparisons
        ]

    def _metadata(self, number: int, row: Row) -> dict[str, Any]:
        """Other columns as they are; those of a `metadata` column, as `PreferencePair.to_dict` writes it, join them."""
        metadata = _kept((name, value) for name, value in row.items() if name not in self._own)
        if isinstance(metadata.get("metadata"), dict):
            metadata = _kept(metadata.pop("metadata").items()) | metadata
        metadata.setdefault("source", self._name)
        if self._is_kwise:
            metadata["group"] = f"{self._name}:{number}"
        return metadata


def _optional(row: Row, name: str) -> float | None:
    """A number, or None where the cell is empty; tables write a missing number as NaN or as nothing."""
    value = row.get(name)
    return None if value is None or value == "" or value != value else read_number(name, value)


def _kept(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value != "" and _is_json(value)}


def _is_json(value: object) -> bool:
    """Whether JSON can say the value; NaN is a missing number, and bytes or dates are left out."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return abs(value) < float("inf")
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, dict) and all(isinstance(name, str) and _is_json(item) for name, item in value.items())


def mixed(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> tuple[PreferencePair, ...]:
    """The pairs of all sources, each source as often as its weight says.

    A source of weight `w` gives all its pairs `floor(w)` times and a random `w - floor(w)` of them once more; repeats
    carry `metadata["copy"]`, counted from 1. The draw depends on the seed and the source's place in the list alone.

    Args:
        loaded: each source with its pairs.
        seed: of the random parts.
    """
    mixture: list[PreferencePair] = []
    for place, (source, loaded_pairs) in enumerate(loaded):
        pairs = loaded_pairs.pairs
        whole = int(source.weight)
        for copy in range(whole):
            mixture.extend(_marked(pairs, copy))
        num_more = round((source.weight - whole) * len(pairs))
        drawn = random_positions(len(pairs), num_more, [seed, place])
        mixture.extend(_marked([pairs[index] for index in drawn], whole))
    return tuple(mixture)


def _marked(pairs: Sequence[PreferencePair], copy: int) -> Iterable[PreferencePair]:
    return (replace(pair, metadata={**pair.metadata, "copy": copy}) for pair in pairs) if copy else pairs
