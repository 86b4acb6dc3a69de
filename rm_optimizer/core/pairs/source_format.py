"""Format of a source's rows, as its first rows show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rm_optimizer.core.pairs.column_hints import no_format, require_readable, winner_untold
from rm_optimizer.core.pairs.formats import FORMATS, OPTIONAL_COLUMNS, READ_COLUMNS, RowFormat, detect_format
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, first_renamed, renamed, structured_columns
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.core.rows.unread_columns import unread_note
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import Spelling

FIRST_ROWS = 50
"""Rows that decide the format and the columns."""


@dataclass(frozen=True)
class SourceFormat:
    """Format of a source's rows, as its first rows show it.

    Args:
        rows: the source's rows, numbered, under our column names.
        row_format: format of the rows.
        has_one_response: True for rows of the k-wise format that are single responses, to be grouped by prompt.
        structured: columns of responses whose text is read as the list that it spells.
        notes: sentences on columns that look like content and are not read.
    """

    rows: Iterator[tuple[int, Row]]
    row_format: RowFormat
    has_one_response: bool
    structured: frozenset[str]
    notes: tuple[str, ...]


def format_of(
    source: DataSource,
    first: Sequence[tuple[int, Row]],
    rest: Iterable[tuple[int, Row]] = (),
    spelling: Spelling = Spelling.hydra,
    *,
    named: str | None = None,
) -> SourceFormat:
    """The format named or detected, once the columns are known to be there and to mean what they are read as.

    Args:
        source: source to read, with its options.
        first: its first `FIRST_ROWS` rows, numbered.
        rest: the rows after them, which are not looked at.
        spelling: form of option names in messages.
        named: name of the source in its notes; None takes its path.

    Raises:
        DataError: if the first rows lack a column, look like no format, or hold a column that would be misread.
    """
    mapped = first_renamed(first, source.path, source.columns, spelling)
    structured, said = structured_columns(named or source.path, [row for _, row in mapped], source.format, spelling)
    numbered = list(renamed(mapped, {}, structured))
    ours = [row for _, row in numbered]
    names = {name for row in ours for name in row}
    form = source.named_format or detect_format(ours)
    if form is None or (source.named_format and not any(names >= required for required in form.required)):
        forms = FORMATS.values() if form is None else [form]
        raise no_format(source.path, ours, source.columns, forms, spelling)
    if form.name == "winner" and source.winner is None:
        raise winner_untold(source.path, ours, source.columns, spelling)
    unread = _unread(source, form, spelling)
    require_readable(source.path, ours, source.columns, spelling)
    has_one_response = form.name == "kwise" and "responses" not in first[0][1] and "responses" not in source.columns
    read = form.columns | {"response", "score", *OPTIONAL_COLUMNS} | CONTEXT_COLUMNS
    note = unread_note(named or source.path, ours, read, spelling)
    notes = (*said, *(each for each in (unread, note) if each is not None))
    others = renamed(rest, source.columns, structured)
    return SourceFormat(chain(numbered, others), form, has_one_response, structured, notes)


def _unread(source: DataSource, form: RowFormat, spelling: Spelling) -> str | None:
    """Sentence on a mapping or values of a winner column that the rows' format does not read; None if it reads all.

    Raises:
        DataError: with that sentence, if the options are the source's own and not those of all sources.
    """
    read = form.columns | ({"response", "score"} if form.name == "kwise" else set())
    unread = {ours: theirs for ours, theirs in source.columns.items() if theirs and ours in READ_COLUMNS - read}
    options = {"columns": spelling.columns(unread)} if unread else {}
    if source.winner is not None and form.name != "winner":
        options["winner"] = spelling.option("winner", str(source.winner))
    if not options:
        return None
    text = (
        f"{source.path}: {' and '.join(options.values())} has no effect here, since the rows are read by format "
        f"{form.name} ({form.expects}); leave it out, or name the format that reads it with "
        f"{spelling.option('format', 'NAME')}"
    )
    if options.keys() <= source.inherited:
        return text
    raise DataError(text)
