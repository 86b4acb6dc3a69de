"""Pairs of sources: the format that the first rows show, the pairs of each row, notes, and mixtures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rm_optimizer.core.pairs.column_hints import contrary_notes, no_format, require_readable, unread_note
from rm_optimizer.core.pairs.formats import (
    LAYOUTS,
    OPTIONAL_COLUMNS,
    PER_RESPONSE,
    READ_COLUMNS,
    SINGLE_RESPONSE,
    RowFormat,
    detect_format,
    gather_responses,
)
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.sources import DataSource, preference
from rm_optimizer.core.rows.bad_rows import PairRow, RowTally, SkippedRow
from rm_optimizer.core.rows.columns import (
    CONTEXT_COLUMNS,
    in_context,
    read_number,
    renamed,
    require_columns,
    structured_columns,
)
from rm_optimizer.core.rows.messages import is_empty
from rm_optimizer.core.rows.readers import Row, read_rows, source_name
from rm_optimizer.errors import ConfigError, DataError, did_you_mean
from rm_optimizer.schema.data import DataConfig, KwiseRule, Spelling

FIRST_ROWS = 50
"""Rows that decide the format and the columns."""


@dataclass(frozen=True)
class SourceFormat:
    """Format of a source's rows, as its first rows show it.

    Args:
        source: source and how to read it.
        form: format of its rows.
        has_one_response: True for rows of the k-wise format that are single responses, to be grouped by prompt.
        structured: columns of responses whose text is read as the list that it spells.
        notes: sentences on columns that look like content and are not read.
    """

    source: DataSource
    form: RowFormat
    has_one_response: bool
    structured: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: DataSource, first: Sequence[tuple[int, Row]]) -> SourceFormat:
        """Format named or detected, once the columns are known to be there and to mean what they are read as.

        Args:
            source: source to read, with its options.
            first: its first `FIRST_ROWS` rows, numbered.

        Raises:
            DataError: if the rows lack a column, look like no format, or hold a column that would be misread.
        """
        require_columns(source.path, [row for _, row in first], source.columns)
        mapped = list(renamed(first, source.columns))
        structured, notes = structured_columns(source.path, [row for _, row in mapped], source.format)
        rows = [row for _, row in renamed(mapped, {}, structured)]
        names = {name for row in rows for name in row}
        form = source.named_format or detect_format(rows)
        if form is None or (source.named_format and not any(names >= required for required in form.required)):
            raise no_format(source, rows)
        unread = _unread_options(source, form)
        require_readable(source, form, rows)
        has_one_response = form.name == "kwise" and "responses" not in first[0][1] and "responses" not in source.columns
        read = form.columns | SINGLE_RESPONSE | {*OPTIONAL_COLUMNS, *CONTEXT_COLUMNS}
        notes += [note for note in (unread, unread_note(source.path, rows, read)) if note is not None]
        return cls(source, form, has_one_response, structured, tuple(notes))

    def pairs(
        self, rows: Iterable[tuple[int, Row]], kwise_rule: KwiseRule, tally: RowTally
    ) -> Iterator[tuple[int, PreferencePair]]:
        """Pairs of rows, each with the number of its row; a row that gives none is put into the tally.

        Args:
            rows: numbered rows as they are stored.
            kwise_rule: pairs that a row of many scored responses gives.
            tally: tally of the rows.

        Raises:
            DataError: if a row is bad and the tally stops there.
        """
        ours = renamed(rows, self.source.columns, self.structured)
        for number, row in gather_responses(ours, tally.report) if self.has_one_response else ours:
            try:
                pairs, reason = self._compared(number, row, kwise_rule)
            except ValueError as error:
                tally.report(number, str(error))
                continue
            except RecursionError:
                tally.report(number, "its values are nested too deeply")
                continue
            if reason is not None:
                tally.report(number, f"a pair of it is bad ({reason}), and left out" if pairs else reason)
            elif not pairs:
                tally.skip(number, "no pair: no two responses that differ in text and score")
            yield from ((number, pair) for pair in pairs)

    def _compared(self, number: int, row: Row, kwise_rule: KwiseRule) -> tuple[list[PreferencePair], str | None]:
        """Pairs of a row, and the reason if one of its comparisons gives no pair.

        Raises:
            ValueError: if the row cannot be compared or its winner is unknown.
        """
        # Columns that nothing reads are metadata; those of a `metadata` column, as `PreferencePair.to_dict` writes it,
        # join them.
        metadata = _kept((name, value) for name, value in row.items() if name not in self._columns)
        if isinstance(metadata.get("metadata"), dict):
            metadata = _kept(metadata.pop("metadata").items()) | metadata
        metadata.setdefault("source", self.source.name)
        if self.form.makes_groups:
            metadata["group"] = f"{source_name(self.source.path)}:{number}"
        if self.form.name == "winner" and self.source.winner_values is not None:
            row = row | {"winner": preference(self.source.winner_values, row.get("winner"))}
        comparisons = self.form.compare(row, kwise_rule)
        missing = {
            name
            for name in OPTIONAL_COLUMNS
            if is_empty(row.get(name)) or str(row[name]).strip().casefold() in ("nan", "none")
        }
        margin, label, weight = (None if name in missing else read_number(name, row[name]) for name in OPTIONAL_COLUMNS)
        pairs: list[PreferencePair] = []
        reason: str | None = None
        for item in comparisons:
            own_label = self.source.label if item.label is None else item.label
            try:
                pair = PreferencePair(
                    in_context(row, item.prompt, self.source.columns),
                    item.chosen,
                    item.rejected,
                    margin=margin if margin is not None else item.margin,
                    metadata=metadata | _kept(item.extra.items()),
                    label=own_label if label is None else label,
                    weight=1.0 if weight is None else weight,
                )
            except ValueError as error:
                reason = str(error)
            else:
                pairs.append(pair)
        return pairs, reason

    @cached_property
    def _columns(self) -> frozenset[str]:
        """Columns that are no metadata; beside a list of responses, `response` and `score` are."""
        return self.form.columns - SINGLE_RESPONSE | {PER_RESPONSE, *OPTIONAL_COLUMNS, *CONTEXT_COLUMNS}


def _unread_options(source: DataSource, form: RowFormat) -> str | None:
    """Sentence on a mapping or values of a winner column that the rows' format does not read; None if it reads all.

    Raises:
        DataError: with that sentence, if the source brings the options, which are not defaults of all sources.
    """
    entrance = Spelling.current()
    unread = {ours: theirs for ours, theirs in source.columns.items() if theirs and ours in READ_COLUMNS - form.columns}
    options = {"columns": entrance.columns(unread)} if unread else {}
    if source.winner is not None and form.name != "winner":
        options["winner"] = entrance.option("winner", str(source.winner))
    if not options:
        return None
    text = (
        f"{source.path}: {' and '.join(options.values())} has no effect here, since the rows are read by format "
        f"{form.name} ({form.expects}); leave it out, or name the format that reads it with "
        f"{entrance.option('format', 'NAME')}"
    )
    if options.keys() <= source.inherited:
        return text
    raise DataError(text)


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


@dataclass(frozen=True, eq=False)
class SourcePairs:
    """Pairs in the order of their rows.

    Args:
        pairs: the pairs.
        skipped: rows that gave none.
        rows: row of each pair; empty for pairs that were not read from rows.
        notes: sentences on columns that look like content or tell the preference, and are not read.
        sources: paths and names of the sources.
    """

    pairs: tuple[PreferencePair, ...]
    skipped: tuple[SkippedRow, ...] = ()
    rows: tuple[PairRow, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def take(self, positions: Iterable[int], skipped: tuple[SkippedRow, ...] = ()) -> SourcePairs:
        """The pairs at these positions."""
        kept = list(positions)
        rows = tuple(self.rows[i] for i in kept) if self.rows else ()
        return SourcePairs(tuple(self.pairs[i] for i in kept), skipped, rows, self.notes, self.sources)

    @staticmethod
    def joined(parts: Sequence[SourcePairs]) -> SourcePairs:
        """The pairs of all parts, one after another."""
        pairs = tuple(pair for part in parts for pair in part.pairs)
        rows = tuple(row for part in parts for row in part.rows)
        return SourcePairs(
            pairs,
            tuple(row for part in parts for row in part.skipped),
            rows if len(rows) == len(pairs) else (),
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            tuple(dict.fromkeys(source for part in parts for source in part.sources)),
        )


def read_pairs(sources: Sequence[DataSource], options: DataConfig) -> SourcePairs:
    """Pairs of all sources, repeated or sampled by the sources' weights.

    Files of a folder have its name as their source; files of equal names have their paths.

    Args:
        sources: sources to read, with their own options.
        options: options for bad rows and k-wise rows, and the seed of fractional weights.

    Raises:
        DataError: if a source cannot be read or a row is bad, or no pair is left.
    """
    parts = [(item, part) for item in sources for part in item.files()]
    num_named = Counter(name for name, _ in {(part.name, part.path) for _, part in parts})
    loaded: list[tuple[DataSource, SourcePairs]] = []
    notes: list[str] = []
    for item, part in parts:
        name = part.path if num_named[part.name] > 1 else part.name
        files = [replace(item, path=path, name=name) for path in part.files]
        found = [(file, load_source(file, options)) for file in files]
        notes += [note.replace(file.path, part.path, 1) for file, result in found for note in result.notes]
        notes += contrary_notes(replace(item, path=part.path), [pair for _, result in found for pair in result.pairs])
        if part.left_out:
            others = f"{', '.join(part.left_out[:5])}{', …' if len(part.left_out) > 5 else ''}"
            notes.append(f"{part.path}: {len(found)} files are read, {len(part.left_out)} are left out: {others}")
        loaded += found
    mixture = mixed(loaded, options.split_seed)
    paths = tuple(item.path for item in sources)
    if not mixture.pairs:
        raise DataError(f"no pair is left of {', '.join(paths)}: raise the sources' weights")
    skipped = tuple(row for _, result in loaded for row in result.skipped)
    return replace(mixture, skipped=skipped, notes=tuple(dict.fromkeys(notes)), sources=paths)


def load_source(source: DataSource, options: DataConfig) -> SourcePairs:
    """Read every pair of a file. A k-wise row without two different scores is listed, but not bad.

    Args:
        source: file to read, with its own options.
        options: options for bad rows and k-wise rows.

    Raises:
        DataError: if the source cannot be read, its columns fit no format, a row is bad, too many are, or no pair is
            left.
    """
    tally = RowTally(source.path, options)
    stored = read_rows(source.path, tally.report_unread) if source.rows is None else enumerate(source.rows, 1)
    rest = tally.counted(iter(stored))
    first = list(itertools.islice(rest, FIRST_ROWS))
    if not first:
        raise tally.nothing_left()
    form = SourceFormat.of(source, first)
    found = list(form.pairs(itertools.chain(first, rest), options.kwise_rule, tally))
    tally.require_few_bad()
    if not found:
        raise tally.nothing_left()
    rows = tuple(PairRow(tally, number) for number, _ in found)
    return SourcePairs(tuple(pair for _, pair in found), tuple(tally.skipped), rows, form.notes)


def mixed(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> SourcePairs:
    """Pairs of all sources, repeated or sampled by the sources' weights.

    A source of weight `w` gives all its pairs `floor(w)` times and a random `w - floor(w)` of them once more; repeats
    carry `metadata["copy"]`, counted from 1. The draw depends on the seed and the source's place in the list alone.

    Args:
        loaded: each source with its pairs.
        seed: seed of the random parts.
    """
    parts: list[SourcePairs] = []
    for place, (source, found) in enumerate(loaded):
        num_pairs, whole = len(found.pairs), int(source.weight)
        drawn = random_positions(num_pairs, round((source.weight - whole) * num_pairs), [seed, place]).tolist()
        for copy, positions in enumerate([*[range(num_pairs)] * whole, drawn]):
            part = found.take(positions)
            pairs = (replace(pair, metadata={**pair.metadata, "copy": copy}) for pair in part.pairs)
            parts.append(replace(part, pairs=tuple(pairs)) if copy else part)
    return SourcePairs.joined(parts)


def register_layout(
    name: str, layout: Mapping[str, Any], *, rows: Iterable[Mapping[str, Any]], pairs: Sequence[PreferencePair]
) -> None:
    """Give the layout of a table a name, which `data.format=NAME` and `--format NAME` take like a row format's.

    Args:
        name: name of the layout, letters, digits and underscores.
        layout: `format`, `columns`, `winner` and `label`, as a source in `data.train` has them; none must be given.
        rows: example rows of the table.
        pairs: the pairs of these rows, of which prompt, responses, margin, label and weight are compared.

    Raises:
        ConfigError: if the layout has an unknown option, the name is taken, or the rows give other pairs.
        DataError: if the rows cannot be read so.

    Example:
        >>> row = {"question": "2 + 2?", "a": "4", "b": "5", "vote": "left"}
        >>> columns = {"prompt": "question", "response_a": "a", "response_b": "b", "winner": "vote"}
        >>> layout = {"columns": columns, "winner": "left,right"}
        >>> register_layout("votes", layout, rows=[row], pairs=[PreferencePair("2 + 2?", "4", "5")])
    """
    for option in layout:
        if option not in (known := ("format", "columns", "winner", "label")):
            raise ConfigError(did_you_mean("option of a layout", option, known))
    with Spelling.python.used():
        found = load_source(DataSource("rows", **layout, rows=[dict(row) for row in rows]), DataConfig())
    got, expected = ([{**pair.to_dict(), "metadata": {}} for pair in each] for each in (found.pairs, pairs))
    if got != expected:
        both = itertools.zip_longest(expected, got)
        place, (wanted, read) = next((i, each) for i, each in enumerate(both, 1) if each[0] != each[1])
        raise ConfigError(
            f"layout '{name}' must read its rows as the given pairs, but pair {place} is {read}, not {wanted}"
        )
    if dict(LAYOUTS).get(name) != layout:  # a cell of a notebook may run again
        LAYOUTS.add(name, {**layout})
