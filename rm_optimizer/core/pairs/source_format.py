"""Format of a source, as its first rows show it: a named or general one, or a published layout's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

from rm_optimizer.core.pairs.column_hints import (
    Suggestion,
    no_format,
    objection,
    suggestion,
    text_hint,
    unread_notes,
)
from rm_optimizer.core.pairs.formats import Comparison, RowFormat, detect_format
from rm_optimizer.core.pairs.layouts import ALWAYS_READ, Layout, published, require_columns
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.pairs.winner import TODO, few_values
from rm_optimizer.core.rows.bad_rows import RowTally
from rm_optimizer.core.rows.columns import (
    OPTIONAL_COLUMNS,
    columns_at,
    columns_of,
    in_context,
    read_number,
)
from rm_optimizer.core.rows.gathering import PER_RESPONSE, SINGLE_RESPONSE, gather_responses, gather_trees
from rm_optimizer.core.rows.messages import are_texts, is_empty
from rm_optimizer.core.rows.readers import Row, each, source_name
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import KwiseRule, Spelling

_Numbered: TypeAlias = Sequence[tuple[int, Row]]
FIRST_ROWS = 50
"""Rows that decide the format and the columns."""
_MOST_BAD = 0.1
"""Share of the first rows that need not have a layout's columns or be read by it."""


class ComparedRow(NamedTuple):
    """A row and its comparisons.

    Args:
        row: the row under our names.
        comparisons: its comparisons, each with a label.
        metadata: values of columns that are not read.
    """

    row: Row
    comparisons: list[Comparison]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class SourceFormat:
    """Format of a source's rows, as its first rows show it.

    Args:
        source: source and how to read it.
        form: format of its rows.
        has_one_response: True for rows of the k-wise format that are single responses, to be grouped by prompt.
        notes: sentences on columns that look like content and are not read.
    """

    source: DataSource
    form: RowFormat
    has_one_response: bool
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: DataSource, first: _Numbered) -> SourceFormat:
        """Format named or detected, once the columns are known to be there and to mean what they are read as.

        Args:
            source: source to read, with its options.
            first: its first `FIRST_ROWS` rows, numbered.

        Raises:
            DataError: if the rows lack a column, look like no format, fit two layouts, or hold a column that would be
                misread.
        """
        layout = source.layout
        known, near = _recognized(source, first) if layout.is_open else (None, [])
        if isinstance(known, SourceFormat):
            return known
        if known is not None:
            raise DataError(f"{source.path}: {known.text}")
        require_columns(source.path, layout, [row for _, row in first])
        stored = list(_belonging(layout, first, RowTally.of_trial(source.path))) or first
        rows = [layout.ours(row) for _, row in stored]
        form = layout.named_format or detect_format(rows)
        if form is None or not any(map(form.fits, rows)):
            raise no_format(source, rows, near)
        lost = [each for each in near if ": prompt is not read by layout" in each]
        notes = [
            *(f"read as format {form.name}, not as {each}" for each in lost[:1]),
            *unread_notes(source, form, rows),
        ]
        if (reason := objection(source, form, rows)) is not None:
            raise DataError(f"{source.path}: {reason}")
        has_one_response = form.name == "kwise" and "responses" not in rows[0]
        return cls(source, form, has_one_response, tuple(f"{source.path}: {note}" for note in notes))

    @classmethod
    def opened(cls, source: DataSource, tally: RowTally) -> tuple[SourceFormat, Iterator[tuple[int, Row]]]:
        """Format of a source, and all of its rows, numbered.

        Raises:
            DataError: if it has no rows, cannot be read, or has no format.
        """
        rows = tally.counted(source.stored(tally.report_unread))
        if not (first := list(itertools.islice(rows, FIRST_ROWS))):
            raise tally.nothing_left()
        form = cls.of(source, first)
        tally.layout = form.source.layout.name
        return form, itertools.chain(first, rows)

    @property
    def needs_whole_file(self) -> bool:
        """True if rows must be gathered from the whole file before they can be compared."""
        return self.has_one_response or "parent" in self.source.layout.tree

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
        for number, row in self.compared(rows, kwise_rule, tally):
            pairs: list[PreferencePair] = []
            reason: str | None = None
            for item in row.comparisons:
                if self.form.makes_groups and item.chosen == item.rejected:
                    continue
                try:
                    numbers = item.margin, row.metadata | _kept(item.extra.items()), item.label or 0.0, item.weight
                    pairs.append(PreferencePair(item.prompt, item.chosen, item.rejected, *numbers))
                except ValueError as error:
                    reason = str(error)
            if reason is not None:
                tally.report(number, f"a pair of it is bad ({reason}), and left out" if pairs else reason)
            elif not pairs:
                is_single = len(row.row.get("responses") or ()) == 1
                differing = "no two responses that differ in text and score"
                tally.skip(number, f"no pair: {'its prompt has one response alone' if is_single else differing}")
            yield from ((number, pair) for pair in pairs)

    def compared(
        self, rows: Iterable[tuple[int, Row]], kwise_rule: KwiseRule, tally: RowTally
    ) -> Iterator[tuple[int, ComparedRow]]:
        """Comparisons of rows, also of equal responses; arguments and errors as in `pairs`."""
        layout = self.source.layout
        ours = each(_belonging(layout, rows, tally), partial(layout.read, names=self._read), tally.report)
        if self.has_one_response:
            ours = gather_responses(ours, tally.report, layout.group)
        file = source_name(self.source.path)
        for number, found in each(ours, partial(self._compared, kwise_rule), tally.report):
            if self.form.makes_groups:
                turn = f".{found.row['turn']}" if layout.tree else ""
                found.metadata["group"] = f"{file}:{number}{turn}"
            yield number, found

    def _compared(self, kwise_rule: KwiseRule, row: Row) -> ComparedRow:
        """Comparisons of a row.

        Raises:
            ValueError: if the row cannot be compared or its winner is unknown.
        """
        layout = self.source.layout
        # Columns that nothing reads are metadata; those of a `metadata` column, as `PreferencePair.to_dict` writes it,
        # join them.
        metadata = _kept((name, value) for name, value in row.items() if name not in self._read)
        if isinstance(metadata.get("metadata"), dict):
            metadata = _kept(metadata.pop("metadata").items()) | metadata
        if self.source.is_named and "source" in metadata:
            metadata.setdefault("subset", metadata.pop("source"))
        metadata.setdefault("source", self.source.name)
        if are_texts(metadata["source"]):
            metadata["source"] = ", ".join(metadata["source"])
        if self.form.name == "winner" and layout.verdicts is not None:
            row = row | {"winner": layout.verdicts.read(row.get("winner"))}
        numbers: dict[str, Any] = {
            name: read_number(name, row[name])
            for name in OPTIONAL_COLUMNS
            if not is_empty(row.get(name)) and str(row[name]).strip().casefold() not in ("nan", "none")
        }
        comparisons = self.form.compare(row, kwise_rule)
        if comparisons:  # of one prompt
            numbers["prompt"] = in_context(row, comparisons[0].prompt, layout.columns)
        own = [numbers if item.label is not None else {"label": layout.label, **numbers} for item in comparisons]
        return ComparedRow(row, [replace(item, **more) for item, more in zip(comparisons, own, strict=True)], metadata)

    def is_meant_before(self, other: SourceFormat, present: frozenset[str]) -> bool:
        """True if it asks for more of the columns than the other and passes over none that the other reads."""
        (mine, passed), (theirs, passed_by_other) = self._claim(present), other._claim(present)
        return theirs < mine and passed <= passed_by_other

    def _claim(self, present: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Columns that it needs, and those that it neither reads nor ignores."""
        layout = self.source.layout
        of_format = next((each for each in self.form.required if present >= each), frozenset[str]())
        required = frozenset(name for path in layout.required for name in columns_at(path, present)) or of_format
        own = self._read - {ours for ours in layout.columns if ours not in required}
        return required, frozenset(each for each in present - required - own if not layout.ignores(each))

    @cached_property
    def _read(self) -> frozenset[str]:
        """Columns that are read and no metadata; with a list of responses, `response` and `score` are metadata."""
        columns = self.form.columns | {PER_RESPONSE, *ALWAYS_READ}
        return columns if self.has_one_response else columns - SINGLE_RESPONSE


def _kept(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value != "" and _is_json(value)}


def _is_json(value: object) -> bool:
    """True if JSON can express the value; NaN is a missing number, and bytes or dates are left out."""
    try:
        return isinstance(value, str | int) or bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


def _belonging(layout: Layout, rows: Iterable[tuple[int, Row]], tally: RowTally) -> Iterator[tuple[int, Row]]:
    """The rows and answers that a layout compares, with its trees gathered; the tally takes note of the others."""

    def wanted() -> Iterator[tuple[int, Row]]:
        for number, row in rows:
            kept, reason = layout.belonging(layout.spelled(row))
            if reason is not None:
                tally.skip(number, reason if kept is None else f"one or more of its answers are {reason}")
            if kept is not None:
                yield number, kept

    return gather_trees(wanted(), layout.tree, tally.report) if layout.tree else wanted()


def _recognized(source: DataSource, first: _Numbered) -> tuple[SourceFormat | Suggestion | None, list[str]]:
    """The format of the first rows by a published layout, or what it asks to parse, and why others do not read them.

    A layout fits if nine of ten rows have its columns and are read by it; if none fits, one that reads a row does. One
    of two that fit is meant only if it asks for more columns and leaves out none that the other reads.

    Args:
        source: source without a format or mapping.
        first: its first rows, numbered.

    Raises:
        DataError: if two layouts fit of which none is meant alone, or the rows have the columns of a layout and no
            format, and cannot be read.
    """
    rows = [source.layout.spelled(row) for _, row in first]
    present = frozenset(columns_of(rows))
    fits, some, near, hint = list[SourceFormat](), list[SourceFormat](), list[str](), None
    meanings = dict[str, tuple[tuple[str, str, str, float], ...]]()
    layouts = [each for each in published().values() if sum(map(each.fits, rows)) >= (1 - _MOST_BAD) * len(rows)]
    if layouts and (general := detect_format(rows)) is not None:
        layouts.append(Layout(format=general.name))
    for layout in layouts:
        tally = RowTally.of_trial(source.path)
        own = source.layout.to_dict() | {"columns": {**layout.columns, **source.layout.columns}}
        candidate = replace(source, layout=replace(layout, **own))
        try:
            form = SourceFormat.of(candidate, first)
            pairs = [pair for _, pair in form.pairs(first, KwiseRule.all, tally)]
        except DataError as error:
            near.append(f"{layout.shown}: {str(error).removeprefix(f'{source.path}: ')}")
            if layout.name and (found := text_hint([*map(candidate.layout.ours, rows)], candidate.layout)):
                hint = hint or replace(found, told=f"{layout.shown}: {found.told}")
            continue
        causes = tally.causes()
        near += [f"{layout.shown}: {cause}" for cause, _ in causes.most_common(1)]
        near += [f"{layout.shown}: {row.reason}" for row in tally.skipped[:1] if not pairs and not causes]
        if pairs:
            (fits if causes.total() <= _MOST_BAD * len(rows) else some).append(form)
            meanings[layout.shown] = tuple((each.prompt_id, each.chosen, each.rejected, each.label) for each in pairs)
    fits = fits or some
    meant = [one for one in fits if not any(other.is_meant_before(one, present) for other in fits)]
    shown = [each.source.layout.shown for each in meant]
    if len({meanings[name] for name in shown}) > 1:
        options = " or ".join(Spelling.current().option(name, "NAME") for name in ("layout", "format"))
        raise DataError(f"{source.path}: the rows fit {' and '.join(shown)}; name the one that is meant with {options}")
    if not meant or not (layout := meant[-1].source.layout).name:
        return hint, near
    other = Spelling.current().option("layout", "NAME")
    note = f"read as {layout.shown}, {layout.in_words()}; name another with {other}, or map columns"
    return replace(meant[-1], notes=(f"{source.path}: {note}", *meant[-1].notes)), near


def first_rows(source: DataSource) -> list[tuple[int, Row]]:
    """The first rows of a source that can be read, which decide its format.

    Raises:
        DataError: if the source has no rows.
    """
    first = list(itertools.islice(source.stored(lambda number, reason: None), FIRST_ROWS))
    if not first:
        raise DataError(f"{source.path}: the file holds no rows")
    return first


def suggested_layout(source: DataSource, first: _Numbered) -> tuple[dict[str, Any], str]:
    """The shortest layout of rows as a mapping, with `TODO` where only a person can tell, and a sentence on it.

    Args:
        source: source, whose own options are part of the layout.
        first: its first rows, numbered.

    Raises:
        DataError: if two published layouts fit, or the rows hold no comparisons.
    """
    known = _recognized(source, first)[0] if source.layout.is_open else None
    with suppress(DataError):  # also where text must be parsed, which the hint says
        form = known if isinstance(known, SourceFormat) else SourceFormat.of(source, first)
        read = form.source.layout
        layout = read if read.name else replace(read, format=form.form.name)
        with_options = "without an option" if source.layout.is_open else "by these options"
        return layout.to_dict(), f"{source.path} is read {with_options}, as {layout.shown}, which is:"
    rows = [source.layout.ours(row) for _, row in first]
    found = known if isinstance(known, Suggestion) else suggestion(rows, source.layout)
    told = {name: value for name in ("columns", "parse", "winner") if (value := getattr(found, name))}
    if not told:
        raise DataError(f"{source.path}: {found.text}")
    note = f"{source.path}: save this as mine.yaml for --layout mine.yaml"
    if TODO in str(told):
        note += ", with what the rows mean in place of TODO"
        if values := few_values(rows, str(found.columns.get("winner", "winner"))):
            note += f"; the winner is {', '.join(values)}: name the values for the first, the second and ties"
    return source.layout.to_dict() | told, note
