"""The pairs of sources: read, with bad rows refused or listed, and mixed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.formats import gather_responses
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.row_pairs import numbered_pairs
from rm_optimizer.core.pairs.source_format import FIRST_ROWS, format_of
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.bad_rows import PairRows, RowTally, SkippedRow
from rm_optimizer.core.rows.readers import Row, read_rows, source_files
from rm_optimizer.core.rows.unread_columns import contrary_notes
from rm_optimizer.schema.data import KwiseRule, OnBadRow, Spelling


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

    def called(self, name: str, old: str) -> SourcePairs:
        """The pairs with another name of their source, where no column names it."""
        if name == old:
            return self
        pairs = tuple(
            replace(pair, metadata={**pair.metadata, "source": name}) if pair.metadata["source"] == old else pair
            for pair in self.pairs
        )
        return replace(self, pairs=pairs)


def load_source(
    source: DataSource,
    *,
    kwise_rule: KwiseRule,
    on_bad_row: OnBadRow,
    max_bad_share: float = 1.0,
    spelling: Spelling = Spelling.hydra,
    rows: Sequence[Row] | None = None,
) -> SourcePairs:
    """Read every pair of one source.

    Args:
        source: source to read, with its options.
        kwise_rule: pairs that a row of many scored responses gives.
        on_bad_row: stop at the first bad row, or drop and list them. A k-wise row without two different scores is not
            bad; it gives no pair and is listed either way.
        max_bad_share: most bad rows that may be dropped, as a share of all rows.
        spelling: form of option names in messages.
        rows: the source's rows if they are in memory; None reads them.

    Raises:
        DataError: if the source cannot be read, its columns fit no format, a row is bad, too many are, or no pair is
            left.
    """
    tally = RowTally(source.path, on_bad_row, spelling, max_bad_share)
    stored = read_rows(source.path, tally.report_unread) if rows is None else enumerate(rows, 1)
    rest = tally.counted(stored)
    first = list(itertools.islice(rest, FIRST_ROWS))
    if not first:
        raise tally.nothing_left()
    form = format_of(source, first, rest, spelling)
    numbered = gather_responses(form.rows, tally.report) if form.has_one_response else form.rows
    found = list(numbered_pairs(source, form.row_format, numbered, kwise_rule, report=tally.report, skip=tally.skip))
    tally.require_few_bad()
    if not found:
        raise tally.nothing_left()
    kept = PairRows.of_source(tally, [number for number, _ in found])
    return SourcePairs(tuple(pair for _, pair in found), tuple(tally.skipped), kept, form.notes)


def load_sources(
    sources: Sequence[DataSource], **options: Any
) -> tuple[list[tuple[DataSource, SourcePairs]], tuple[str, ...]]:
    """Each file of the sources with its pairs, and sentences on what is not read, each once.

    Files of a folder have its name as their source; files of equal names have their paths.

    Args:
        sources: sources to read, with their options.
        options: further arguments of `load_source`.

    Raises:
        DataError: as `load_source` and `source_files` raise it.
    """
    parts = [(item, part) for item in sources for part in source_files(item.path)]
    num_named = Counter(name for name, _ in {(part.name, part.path) for _, part in parts})
    loaded: list[tuple[DataSource, SourcePairs]] = []
    notes: list[str] = []
    for item, part in parts:
        name = part.path if num_named[part.name] > 1 else part.name
        files = [replace(item, path=file) for file in part.files]
        found = [(file, load_source(file, **options)) for file in files]
        notes += [note.replace(file.path, part.path, 1) for file, result in found for note in result.notes]
        notes += told_otherwise(replace(item, path=part.path), [pair for _, result in found for pair in result.pairs])
        if part.left_out:
            others = f"{', '.join(part.left_out[:5])}{', …' if len(part.left_out) > 5 else ''}"
            notes.append(f"{part.path}: {len(files)} files are read, {len(part.left_out)} are left out: {others}")
        loaded += [(file, result.called(name, file.name)) for file, result in found]
    return loaded, tuple(dict.fromkeys(notes))


def told_otherwise(source: DataSource, pairs: Sequence[PreferencePair]) -> tuple[str, ...]:
    """Sentences on columns of a source that are not read, and by which the other response is the better one."""
    sides = (source.columns.get("chosen") or "chosen", source.columns.get("rejected") or "rejected")
    return tuple(contrary_notes(source.path, sides, [(pair.metadata, pair.label) for pair in pairs]))


def mixed(loaded: Sequence[tuple[DataSource, SourcePairs]], seed: int) -> tuple[PreferencePair, ...]:
    """Pairs of all sources, repeated or sampled by the sources' weights.

    A source of weight `w` gives all its pairs `floor(w)` times and a random `w - floor(w)` of them once more; repeats
    carry `metadata["copy"]`, counted from 1. The draw depends on the seed and the source's place in the list alone.

    Args:
        loaded: each source with its pairs.
        seed: seed of the random parts.
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
