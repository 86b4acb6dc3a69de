"""Sources of preference pairs named by `data.train` and `data.val`: column mapping, bad rows and mixing."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.column_hints import no_format, require_readable, winner_untold
from rm_optimizer.core.pairs.formats import (
    FORMATS,
    RowFormat,
    detect_format,
    gather_responses,
    row_format,
)
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.bad_rows import PairRows, RowTally, SkippedRow
from rm_optimizer.core.rows.columns import Columns, read_number, renamed, require_mapped
from rm_optimizer.core.rows.readers import Report, Row, read_rows, source_name
from rm_optimizer.core.rows.row_context import CONTEXT_COLUMNS, in_context
from rm_optimizer.core.rows.unread_columns import unread_note
from rm_optimizer.core.rows.winner import Winner, parse_winner
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema.data import KwiseRule, OnBadRow, Spelling

FIRST_ROWS = 50
"""Rows that decide the format and the columns."""
_OPTIONAL = ("margin", "label", "weight")


@dataclass(frozen=True)
class DataSource:
    """One file or data set and how to read it.

    Args:
        path: a file, a saved `datasets` folder or a hub name.
        weight: its share in a mixture: each pair counts `weight` times; a fraction takes a random part.
        format: a row format's name, or "auto".
        columns: column mapping, our name to the file's or to a path such as `answer.text`; None leaves the column out.
        winner: values of the `winner` column that name the better response, as `parse_winner` reads them.
        label: the preference probability of rows that carry none, 0.5 for a file of ties.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """

    path: str
    weight: float = 1.0
    format: str = "auto"
    columns: Columns = field(default_factory=dict)
    winner: Any = None
    label: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"the weight of source {self.path} must be positive, got {self.weight}")
        if not 0 <= self.label <= 1:
            raise ConfigError(f"the label of source {self.path} must lie in [0, 1], got {self.label}")
        _ = self.named_format, self.winner_values
        ours = {name for form in FORMATS.values() for name in form.columns} | {
            "response",
            "score",
            *_OPTIONAL,
            *CONTEXT_COLUMNS,
        }
        for name, theirs in self.columns.items():
            if name == "scores" and str(theirs).rpartition(".")[2].lower() in ("rank", "ranks", "ranking"):
                raise ConfigError(
                    f"data.columns: ranks count from the best, so {theirs} must be mapped as ranks, not as scores"
                )
            if theirs is not None and name not in ours and difflib.get_close_matches(name, ours, n=1, cutoff=0.8):
                raise ConfigError(f"data.columns: {did_you_mean('column of ours', name, ours)}")

    @cached_property
    def name(self) -> str:
        """Short name, which its pairs carry as `metadata["source"]`."""
        return source_name(self.path)

    @cached_property
    def named_format(self) -> RowFormat | None:
        """The row format that the option names; None where the first rows tell."""
        return None if self.format == "auto" else row_format(self.format)

    @cached_property
    def winner_values(self) -> Winner | None:
        """Values of the winner column that name the better response; None where no option gives them."""
        return None if self.winner is None else parse_winner(self.winner)


@dataclass(frozen=True)
class SourcePairs:
    """The pairs of a source in the order of its rows.

    Args:
        pairs: the pairs.
        skipped: rows that gave none.
        rows: rows that the pairs are of.
        notes: sentences on columns that look like content and are not read.
    """

    pairs: tuple[PreferencePair, ...]
    skipped: tuple[SkippedRow, ...]
    rows: PairRows = field(default_factory=PairRows)
    notes: tuple[str, ...] = ()


def parse_sources(
    source: object, *, format: str, columns: Columns | None, winner: object = None
) -> tuple[DataSource, ...]:
    """The sources that an option names: a path or hub name, a mapping with `path`, or a list of these.

    Args:
        source: the option's value.
        format: row format of sources that do not name their own.
        columns: column mapping of sources that do not bring their own.
        winner: values of the winner column of sources that do not bring their own.

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
    defaults = {"format": format, "columns": columns or {}, "winner": winner}
    return tuple(_parse_source(item, defaults) for item in items)


def _parse_source(item: object, defaults: Mapping[str, Any]) -> DataSource:
    options: Mapping[str, Any] = item if isinstance(item, Mapping) else {"path": item}
    known = DataSource.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(did_you_mean("option of a data source", str(name), known))
    path = options.get("path")
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"a data source must be a path, a data-set name or {{path: …}}, got {item!r}")
    values = {**defaults, **options, "path": str(path)}
    for name in ("weight", "label"):
        if name in values:
            try:
                values[name] = read_number(name, values[name])
            except ValueError as error:
                raise ConfigError(f"data source {path}: {error}") from error
    return DataSource(**values)


def load_source(
    source: DataSource,
    *,
    kwise_rule: KwiseRule,
    on_bad_row: OnBadRow,
    max_bad_share: float = 1.0,
    spelling: Spelling = Spelling.hydra,
) -> SourcePairs:
    """Read every pair of one source.

    Args:
        source: source to read, with its options.
        kwise_rule: pairs that a row of many scored responses gives.
        on_bad_row: stop at the first bad row, or drop and list them. A k-wise row without two different scores is not
            bad; it gives no pair and is listed either way.
        max_bad_share: most bad rows that may be dropped, as a share of all rows.
        spelling: form of option names in messages.

    Raises:
        DataError: if the source cannot be read, its columns fit no format, a row is bad, too many are, or no pair is
            left.
    """
    tally = RowTally(source.path, on_bad_row, spelling, max_bad_share)
    rows = tally.counted(read_rows(source.path, tally.report_unread))
    first = list(itertools.islice(rows, FIRST_ROWS))
    if not first:
        raise tally.nothing_left()
    form = format_of(source, first, spelling)
    numbered: Iterable[tuple[int, Row]] = itertools.chain(form.first, renamed(rows, source.columns))
    if form.has_one_response:
        numbered = gather_responses(numbered, tally.report)
    found = list(numbered_pairs(source, form.row_format, numbered, kwise_rule, report=tally.report, skip=tally.skip))
    tally.require_few_bad()
    if not found:
        raise tally.nothing_left()
    kept = PairRows.of_source(tally, [number for number, _ in found])
    return SourcePairs(tuple(pair for _, pair in found), tuple(tally.skipped), kept, form.notes)


@dataclass(frozen=True)
class SourceFormat:
    """Format of a source's rows, as its first rows show it.

    Args:
        first: the first rows, numbered, under our column names.
        row_format: format of the rows.
        has_one_response: True for rows of the k-wise format that are single responses, to be grouped by prompt.
        notes: sentences on columns that look like content and are not read.
    """

    first: Sequence[tuple[int, Row]]
    row_format: RowFormat
    has_one_response: bool
    notes: tuple[str, ...]


def format_of(
    source: DataSource,
    first: Sequence[tuple[int, Row]],
    spelling: Spelling = Spelling.hydra,
    *,
    named: str | None = None,
) -> SourceFormat:
    """The format named or detected, once the columns are known to be there and to mean what they are read as.

    Args:
        source: source to read, with its options.
        first: its first rows, numbered.
        spelling: form of option names in messages.
        named: name of the source in its notes; None takes its path.

    Raises:
        DataError: if the first rows lack a column, look like no format, or hold a column that would be misread.
    """
    raw = [row for _, row in first]
    require_mapped(source.path, source.columns, raw, spelling)
    numbered = list(renamed(first, source.columns))
    ours = [row for _, row in numbered]
    names = {name for row in ours for name in row}
    form = source.named_format or detect_format(ours)
    if form is None or (source.named_format and not any(names >= required for required in form.required)):
        forms = FORMATS.values() if form is None else [form]
        raise no_format(source.path, ours, source.columns, forms, spelling)
    if form.name == "winner" and source.winner is None:
        raise winner_untold(source.path, ours, source.columns, spelling)
    require_readable(source.path, ours, source.columns, spelling)
    has_one_response = form.name == "kwise" and "responses" not in raw[0] and "responses" not in source.columns
    read = form.columns | {"response", "score", *_OPTIONAL} | CONTEXT_COLUMNS
    note = unread_note(named or source.path, ours, read, spelling)
    return SourceFormat(numbered, form, has_one_response, () if note is None else (note,))


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
        source: source of the rows.
        form: their format.
        rows: numbered rows under our column names.
        kwise_rule: pairs that a row of many scored responses gives.
        report: function called for each bad row.
        skip: function called for rows that are not bad and give no pair.
    """
    maker = _PairMaker(source, form)
    for number, row in rows:
        try:
            pairs, reason = maker.pairs(number, row, kwise_rule)
        except ValueError as error:
            report(number, str(error))
            continue
        except RecursionError:
            report(number, "its values are nested too deeply")
            continue
        if reason is not None:
            report(number, f"a pair of it is bad ({reason}), and left out")
        if not pairs and reason is None:
            skip(number, "no pair: no two responses that differ in text and score")
        yield from ((number, pair) for pair in pairs)


class _PairMaker:
    """Makes pairs of the comparisons of a source's rows."""

    def __init__(self, source: DataSource, form: RowFormat) -> None:
        self._source = source
        self._form = form
        self._winner = source.winner_values if form.name == "winner" else None
        self._own = form.columns | set(_OPTIONAL) | CONTEXT_COLUMNS

    def pairs(self, number: int, row: Row, kwise_rule: KwiseRule) -> tuple[list[PreferencePair], str | None]:
        """The row's pairs, and why another of its comparisons is none.

        Raises:
            ValueError: if the row cannot be compared, its winner is unknown, or none of its comparisons is a pair.
        """
        shared = self._metadata(number, row)
        told = row if self._winner is None else row | {"winner": self._winner.preference(row.get("winner"))}
        comparisons = self._form.compare(told, kwise_rule)
        margin, label, weight = (_optional(row, name) for name in _OPTIONAL)
        pairs: list[PreferencePair] = []
        reason: str | None = None
        for item in comparisons:
            own_label = self._source.label if item.label is None else item.label
            try:
                pair = PreferencePair(
                    in_context(row, item.prompt, self._source.columns),
                    item.chosen,
                    item.rejected,
                    margin=margin if margin is not None else item.margin,
                    metadata=shared | _kept(item.extra.items()),
                    label=own_label if label is None else label,
                    weight=1.0 if weight is None else weight,
                )
            except ValueError as error:
                reason = str(error)
            else:
                pairs.append(pair)
        if reason is not None and not pairs:
            raise ValueError(reason)
        return pairs, reason

    def _metadata(self, number: int, row: Row) -> dict[str, Any]:
        """Other columns as they are; those of a `metadata` column, as `PreferencePair.to_dict` writes it, join them."""
        metadata = _kept((name, value) for name, value in row.items() if name not in self._own)
        if isinstance(metadata.get("metadata"), dict):
            metadata = _kept(metadata.pop("metadata").items()) | metadata
        metadata.setdefault("source", self._source.name)
        if self._form.makes_groups:
            metadata["group"] = f"{self._source.name}:{number}"
        return metadata


def _optional(row: Row, name: str) -> float | None:
    """A number, or None where the cell is empty."""
    value = row.get(name)
    return None if value is None or value == "" else read_number(name, value)


def _kept(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value != "" and _is_json(value)}


def _is_json(value: object) -> bool:
    """True if JSON can express the value; NaN is a missing number, and bytes or dates are left out."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return abs(value) < float("inf")
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, dict) and all(isinstance(name, str) and _is_json(item) for name, item in value.items())


def mixed(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> tuple[PreferencePair, ...]:
    """Pairs of all sources, repeated or sampled by the sources' weights.

    A source of weight `w` gives all its pairs `floor(w)` times and a random `w - floor(w)` of them once more; repeats
    carry `metadata["copy"]`, counted from 1. The draw depends on the seed and the source's place in the list alone.

    Args:
        loaded: each source with its pairs.
        seed: of the random parts.
    """
    mixture: list[PreferencePair] = []
    for place, copy, positions in _draws(loaded, seed):
        pairs = loaded[place][1].pairs
        mixture.extend(_marked([pairs[index] for index in positions], copy))
    return tuple(mixture)


def mixed_rows(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> PairRows:
    """The rows of the pairs that `mixed` gives."""
    return PairRows.joined([loaded[place][1].rows.take(positions) for place, _, positions in _draws(loaded, seed)])


def _draws(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Place of a source, number of the copy and positions of its pairs, for each part of the mixture."""
    for place, (source, loaded_pairs) in enumerate(loaded):
        num_pairs, whole = len(loaded_pairs.pairs), int(source.weight)
        yield from ((place, copy, np.arange(num_pairs)) for copy in range(whole))
        yield place, whole, random_positions(num_pairs, round((source.weight - whole) * num_pairs), [seed, place])


def _marked(pairs: Sequence[PreferencePair], copy: int) -> Iterable[PreferencePair]:
    return (replace(pair, metadata={**pair.metadata, "copy": copy}) for pair in pairs) if copy else pairs
