"""Pairs of sources: of a file, of several, and of mixtures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rm_optimizer.core.pairs.column_hints import contrary_notes
from rm_optimizer.core.pairs.layouts import LAYOUTS, Layout
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.source_format import SourceFormat
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.bad_rows import PairRow, RowTally, SkippedRow
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.orders import random_positions
from rm_optimizer.schema.data import DataConfig, OverLong, Spelling


@dataclass(frozen=True, eq=False)
class SourcePairs:
    """Pairs in the order of their rows.

    Args:
        pairs: the pairs.
        skipped: rows that gave none.
        rows: row of each pair; empty for pairs that were not read from rows.
        notes: sentences on columns that look like content or tell the preference, and are not read.
        sources: paths and names of the sources.
        over_long: treatment of pairs with a sequence above the length limit, where they become tokens.
    """

    pairs: tuple[PreferencePair, ...]
    skipped: tuple[SkippedRow, ...] = ()
    rows: tuple[PairRow, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    over_long: OverLong = OverLong.truncate

    def take(self, positions: Iterable[int], skipped: tuple[SkippedRow, ...] = ()) -> SourcePairs:
        """The pairs at these positions."""
        kept = list(positions)
        rows = tuple(self.rows[i] for i in kept) if self.rows else ()
        return SourcePairs(tuple(self.pairs[i] for i in kept), skipped, rows, self.notes, self.sources, self.over_long)

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
            max((part.over_long for part in parts), key=[*OverLong].index, default=OverLong.truncate),
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
        name = item.name if item.is_named else part.path if num_named[part.name] > 1 else part.name
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
    form, rows = SourceFormat.opened(source, tally)
    found = list(form.pairs(rows, options.kwise_rule, tally))
    tally.require_few_bad()
    if not found:
        raise tally.nothing_left()
    places = tuple(PairRow(tally, number) for number, _ in found)
    return SourcePairs(tuple(pair for _, pair in found), tuple(tally.skipped), places, form.notes)


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
        layout: keys of `Layout`, such as `format`, `columns` and `winner`; none must be given.
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
    with Spelling.python.used():
        made = Layout.of(layout)
        found = load_source(DataSource("rows", made, rows=[dict(row) for row in rows]), DataConfig())
    got, expected = ([{**pair.to_dict(), "metadata": {}} for pair in each] for each in (found.pairs, pairs))
    if got != expected:
        both = enumerate(itertools.zip_longest(got, expected), 1)
        told = next(f"pair {place} is {each[0]}, not {each[1]}" for place, each in both if each[0] != each[1])
        raise ConfigError(f"layout '{name}' must read its rows as the given pairs, but {told}")
    if dict(LAYOUTS).get(name) != made:  # a cell of a notebook may run again
        LAYOUTS.add(name, made)
