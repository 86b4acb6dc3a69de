"""Large files cut into blocks, which are read and tokenized separately."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rm_optimizer.core.pairs.column_hints import contrary_notes
from rm_optimizer.core.pairs.pair import PreferencePair, folded_prompt_id, pair_fingerprints
from rm_optimizer.core.pairs.source_format import SourceFormat, first_rows
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.bad_rows import PairRow, RowTally, SkippedRow
from rm_optimizer.core.rows.readers import Report, Row, guarded, parse_lines, source_files
from rm_optimizer.core.tokens.batching import PairValues
from rm_optimizer.core.tokens.cache import EncodedPairs, PairTokens, over_long_rows
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import ConfigError, ConversationRefused, DataError
from rm_optimizer.schema.data import DataConfig, KwiseRule

BLOCK_BYTES = 2**21
"""Approximate bytes of text of a block, which a worker holds in memory at once."""
_MOST_ROWS = 4096
_BUFFER_BYTES = 2**20
_ENDINGS = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a file that one worker reads and tokenizes at once.

    Args:
        file: number of their file in the stream.
        stream_row: rows of the stream before the file.
        first_row: number of the first one in the file, from 1.
        num_rows: number of rows, blank lines included.
        start: byte that the lines start at, or rows of the row group before these.
        stop: the byte or the row after them.
        group: row group of a Parquet file; None for lines.
    """

    file: int
    stream_row: int
    first_row: int
    num_rows: int
    start: int
    stop: int
    group: int | None = None

    def read(self, path: Path, report: Report) -> Iterator[tuple[int, Row]]:
        """The numbered rows; earlier rows of a row group are decoded, a few thousand at a time, and dropped."""
        if self.group is None:
            with path.open("rb") as lines:
                lines.seek(self.start)
                part = io.BytesIO(lines.read(self.stop - self.start))
            yield from parse_lines(path, part, report, first_line=self.first_row)
            return
        numbers, done = itertools.count(self.first_row), 0
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=_MOST_ROWS, row_groups=[self.group], use_threads=False):
                first, last = max(0, self.start - done), min(batch.num_rows, self.stop - done)
                if first < last:
                    yield from zip(numbers, batch.slice(first, last - first).to_pylist(), strict=False)
                done += batch.num_rows
                if done >= self.stop:
                    return


def stream_files(sources: Sequence[DataSource]) -> tuple[SourceFormat, ...]:
    """The files that sources name, patterns such as `big/*.parquet` in sorted order, with the format of each.

    A source of weight 2 gives its files twice.

    Raises:
        DataError: if a file does not exist, is no kind that can be read in parts, or its columns fit no format.
        ConfigError: if a weight is not a whole number.
    """
    opened: list[SourceFormat] = []
    for source in sources:
        if source.weight != int(source.weight):
            raise ConfigError(
                f"the weight of streamed source {source.path} must be a whole number, got {source.weight:g}; a "
                "fraction needs the whole source in memory"
            )
        if source.layout.encoding is not None or source.layout.tokenizer is not None:
            told = "streaming reads texts in UTF-8; convert it, or set data.streaming=off"
            raise DataError(f"{source.path}: {told}")
        found = [name for part in source_files(source.path) for name in part.files]
        for name in found:
            if Path(name).suffix.lower() not in _ENDINGS or Path(name).is_dir():
                raise DataError(
                    f"{name}: streaming reads .parquet and .jsonl files; convert it, or set data.streaming=off"
                )
        opened += [_opened(replace(source, path=name), source.path) for name in found] * int(source.weight)
    return tuple(opened)


def _opened(source: DataSource, named: str) -> SourceFormat:
    """The file with its format, which the first rows that can be read decide, as they do in memory."""
    # A bad row among the first is reported when its block is read.
    first = first_rows(source)
    form = SourceFormat.of(source, first)
    if form.needs_whole_file:
        raise DataError(
            f"{source.path}: streaming reads k-wise rows with responses and scores lists, got one response a row, or "
            "one message, which would have to be gathered from the whole file"
        )
    pairs = [pair for _, pair in form.pairs(first, KwiseRule.all, RowTally.of_trial(source.path))]
    notes = (*form.notes, *contrary_notes(source, pairs))
    return replace(form, notes=tuple(note.replace(source.path, named, 1) for note in notes))


def blocks_of(files: Sequence[SourceFormat], block_bytes: int = BLOCK_BYTES) -> tuple[Block, ...]:
    """The files cut into blocks of about `block_bytes` of text, in order.

    Parquet files tell their row groups; JSON Lines are read once to count their lines.

    Raises:
        DataError: if a file cannot be read.
    """
    blocks: list[Block] = []
    stream_row = 0
    for index, file in enumerate(files):
        path = Path(file.source.path)
        cut = _row_group_blocks if path.suffix.lower() == ".parquet" else _line_blocks
        try:
            found = list(cut(path, block_bytes, index, stream_row))
        except OSError as error:
            raise DataError(f"{path}: the file cannot be read: {error.strerror or error}") from error
        blocks += found
        stream_row += sum(block.num_rows for block in found)
    return tuple(blocks)


def _row_group_blocks(path: Path, block_bytes: int, index: int, stream_row: int) -> Iterator[Block]:
    first = 1
    with pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            meta = file.metadata.row_group(group)
            rows = meta.num_rows
            size = min(_MOST_ROWS, max(1, rows * block_bytes // max(1, meta.total_byte_size)))
            for skip in range(0, rows, size):
                stop = min(skip + size, rows)
                yield Block(index, stream_row, first + skip, stop - skip, skip, stop, group)
            first += rows


def _line_blocks(path: Path, block_bytes: int, index: int, stream_row: int) -> Iterator[Block]:
    start = position = lines = 0
    first, ends_whole = 1, True
    with path.open("rb") as file:
        while chunk := file.read(block_bytes):
            lines += chunk.count(b"\n")
            last = chunk.rfind(b"\n") + 1
            if last and position + last - start >= block_bytes // 2:
                yield Block(index, stream_row, first, lines, start, position + last)
                start, first, lines = position + last, first + lines, 0
            position += len(chunk)
            ends_whole = chunk.endswith(b"\n")
    if position > start:
        lines += not ends_whole  # a last line without an end counts
        yield Block(index, stream_row, first, lines, start, position)


@dataclass(eq=False)
class PairArrays(PairTokens):
    """Token ids and numbers of pairs.

    Args:
        tokens, lengths, pair_index: as in `PairTokens`; the index is the row of the stream, counted from 0.
        values: margins, labels and weights.
    """

    values: PairValues

    def take(self, positions: NDArray[np.int64]) -> PairArrays:
        """The pairs at these positions, copied."""
        sides = [side(i) for i in positions.tolist() for side in (self.chosen, self.rejected)]
        tokens = np.concatenate([self.tokens[:0], *sides])
        return PairArrays(tokens, self.lengths[positions], self.pair_index[positions], self.values.take(positions))

    @classmethod
    def concatenate(cls, parts: Sequence[PairArrays]) -> PairArrays:
        """The pairs of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part.values).values() for part in parts), strict=True)
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.pair_index for part in parts]),
            PairValues(*map(np.concatenate, columns)),
        )


@dataclass(frozen=True, eq=False)
class BlockTokens:
    """Tokens and counts of a block.

    Args:
        pairs: its pairs in the order of its rows, those identical after cutting left out.
        lengths: tokens of both sequences of every pair before cutting, shape (all pairs, 2).
        cuts: tokens cut from prompt and response of both, shape (all pairs, 2, 2).
        rows: its rows that were read, that are bad and that gave no pair.
        fingerprints: `pair_fingerprints` of its pairs, shape (all pairs, 2).
    """

    pairs: PairArrays
    lengths: NDArray[np.int64]
    cuts: NDArray[np.int32]
    rows: RowTally
    fingerprints: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class BlockReader:
    """Turns blocks into pairs.

    Args:
        files: the stream's files.
        options: options for bad rows and k-wise rows.
        held_out_prompts: `folded_prompt_id`s that the stream must not hold.
    """

    files: tuple[SourceFormat, ...]
    options: DataConfig
    held_out_prompts: frozenset[str] = frozenset()

    def tally(self, file: int) -> RowTally:
        """A count of the rows of a file that is still empty."""
        source = self.files[file].source
        return RowTally(source.path, self.options, source.layout.name)

    def pairs(self, block: Block, tally: RowTally) -> Iterator[tuple[int, PreferencePair]]:
        """The block's pairs, each with the number of its row in the file.

        Raises:
            DataError: if a row is bad and that is not to be passed over, or its prompt is held out.
        """
        file = self.files[block.file]
        path = Path(file.source.path)
        rows = tally.counted(guarded(path, block.read(path, tally.report_unread)))
        for number, pair in file.pairs(rows, self.options.kwise_rule, tally):
            if self.held_out_prompts and folded_prompt_id(pair.prompt) in self.held_out_prompts:
                reason = "its prompt is also in data.val (case and blanks aside)"
                row = SkippedRow(file.source.path, number, reason)
                raise DataError(f"{row}; remove it from one, or set data.allow_prompt_overlap=true")
            yield number, pair


@dataclass(frozen=True, eq=False)
class BlockTokenizer:
    """Turns blocks into tokenized pairs; the same in every process."""

    reader: BlockReader
    renderer: ConversationRenderer

    def tokenize(self, block: Block) -> BlockTokens:
        """The block's pairs as token ids.

        Raises:
            DataError: if a row is bad, its prompt is held out, or the chat template or `over_long` refuses it.
        """
        tally = self.reader.tally(block.file)
        numbered = list(self.reader.pairs(block, tally))
        try:
            encoded = EncodedPairs.of([pair for _, pair in numbered], self.renderer)
        except ConversationRefused:
            numbered = self._accepted(numbered, tally)
            encoded = EncodedPairs.of([pair for _, pair in numbered], self.renderer)
        origins, over_long = [PairRow(tally, number) for number, _ in numbered], self.reader.options.over_long
        dropped = over_long_rows(encoded.cuts.sum(axis=2), origins, self.renderer.max_length, over_long)
        if dropped:
            for row in dict.fromkeys(dropped.values()):
                tally.skip(row.row, row.reason)
            numbered = [pair for position, pair in enumerate(numbered) if position not in dropped]
            encoded = EncodedPairs.of([pair for _, pair in numbered], self.renderer)
        pairs, kept = [pair for _, pair in numbered], encoded.differ
        rows = np.array([block.stream_row + number - 1 for number, _ in numbered], dtype=np.int64)
        found = PairArrays(encoded.tokens, encoded.lengths[kept], rows[kept], PairValues.of(pairs).take(kept))
        lengths = encoded.lengths + encoded.cuts.sum(axis=2)
        return BlockTokens(found, lengths, encoded.cuts, tally, pair_fingerprints(pairs))

    def _accepted(
        self, numbered: Sequence[tuple[int, PreferencePair]], tally: RowTally
    ) -> list[tuple[int, PreferencePair]]:
        """The pairs that can be rendered; the rows of the others are bad, each once."""
        accepted: list[tuple[int, PreferencePair]] = []
        refused: set[int] = set()
        for number, pair in numbered:
            if (reason := self.renderer.refusal(pair)) is None:
                accepted.append((number, pair))
            elif number not in refused:
                refused.add(number)
                tally.report(number, reason)
        return accepted
