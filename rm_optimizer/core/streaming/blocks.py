"""Large files cut into blocks that are read separately: parts of a Parquet row group, byte ranges of JSON Lines.

A block's rows keep their numbers in the file, so that the name of a bad row does not depend on the blocks.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import pyarrow.parquet as pq

from rm_optimizer.core.pairs.formats import RowFormat
from rm_optimizer.core.pairs.source_format import FIRST_ROWS, format_of
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.readers import Report, Row, guarded, parse_lines, read_rows, source_files
from rm_optimizer.errors import ConfigError, DataError

BLOCK_BYTES = 2**21
"""Approximate bytes of text of a block, which a worker holds in memory at once."""
_MOST_ROWS = 4096
_BUFFER_BYTES = 2**20
_ENDINGS = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """Consecutive rows of one row group.

    Args:
        group: the row group.
        skip: rows of the group before them.
        first_row: number of the first one in the file, from 1.
        num_rows: number of rows.
    """

    group: int
    skip: int
    first_row: int
    num_rows: int

    def read(self, path: Path, report: Report) -> Iterator[tuple[int, Row]]:
        """The numbered rows; earlier rows of the group are decoded, a few thousand at a time, and dropped."""
        yield from enumerate(self._rows(path), self.first_row)

    def _rows(self, path: Path) -> Iterator[Row]:
        done, stop = 0, self.skip + self.num_rows
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=_MOST_ROWS, row_groups=[self.group], use_threads=False):
                first, last = max(0, self.skip - done), min(batch.num_rows, stop - done)
                if first < last:
                    yield from batch.slice(first, last - first).to_pylist()
                done += batch.num_rows
                if done >= stop:
                    return


@dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive whole lines.

    Args:
        start: the byte they start at.
        stop: the byte after them.
        first_row: number of the first one in the file, from 1.
        num_rows: number of rows, blank ones included.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int

    def read(self, path: Path, report: Report) -> Iterator[tuple[int, Row]]:
        """The numbered rows."""
        with path.open("rb") as file:
            file.seek(self.start)
            lines = io.BytesIO(file.read(self.stop - self.start))
        yield from parse_lines(path, lines, report, first_line=self.first_row)


Part: TypeAlias = ParquetRows | Lines
"""Where a block's rows lie in their file."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that one worker reads and tokenizes at once.

    Args:
        file: number of their file in the stream.
        part: their position in the file.
        stream_row: rows of the stream before the file.
    """

    file: int
    part: Part
    stream_row: int


@dataclass(frozen=True)
class StreamFile:
    """One file of a stream.

    Args:
        source: its path and how to read it.
        form: the format of its rows.
        structured: columns of responses whose text is read as the list that it spells.
        notes: sentences on columns that look like content and are not read.
    """

    source: DataSource
    form: RowFormat
    structured: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def rows(self, part: Part, report: Report) -> Iterator[tuple[int, Row]]:
        """Numbered rows of a part of the file.

        Raises:
            DataError: if the file cannot be read any more.
        """
        path = Path(self.source.path)
        return guarded(path, part.read(path, report))


def stream_files(sources: Sequence[DataSource]) -> tuple[StreamFile, ...]:
    """The files that sources name, patterns such as `big/*.parquet` in sorted order, with the format of each.

    A source of weight 2 gives its files twice.

    Raises:
        DataError: if a file does not exist, is no kind that can be read in parts, or its columns fit no format.
        ConfigError: if a weight is not a whole number.
    """
    return tuple(_opened(file, source.path) for source in sources for file in _expanded(source))


def _expanded(source: DataSource) -> Iterator[DataSource]:
    if source.weight != int(source.weight):
        raise ConfigError(
            f"the weight of streamed source {source.path} must be a whole number, got {source.weight:g}; a fraction "
            "needs the whole source in memory"
        )
    found = [file for part in source_files(source.path) for file in part.files]
    for name in found:
        if Path(name).suffix.lower() not in _ENDINGS or Path(name).is_dir():
            raise DataError(f"{name}: streaming reads .parquet and .jsonl files; convert it, or set data.streaming=off")
    for _ in range(int(source.weight)):
        yield from (replace(source, path=name) for name in found)


def _opened(source: DataSource, named: str) -> StreamFile:
    """The file with its format, which the first rows that can be read decide, as they do in memory."""
    first = list(itertools.islice(read_rows(source.path, _ignore), FIRST_ROWS))
    if not first:
        raise DataError(f"{source.path}: the file holds no rows")
    form = format_of(source, first, named=named)
    if form.has_one_response:
        raise DataError(
            f"{source.path}: streaming reads k-wise rows with responses and scores lists, got one response a row, "
            "which would have to be gathered by prompt from the whole file"
        )
    return StreamFile(source, form.row_format, form.structured, form.notes)


def _ignore(number: int, reason: str) -> None:
    """Ignore a bad row among the first, which is reported when its block is read."""


def blocks_of(files: Sequence[StreamFile], block_bytes: int = BLOCK_BYTES) -> tuple[Block, ...]:
    """The files cut into blocks of about `block_bytes` of text, in order.

    Parquet files tell their row groups; JSON Lines are read once to count their lines.

    Raises:
        DataError: if a file cannot be read.
    """
    blocks: list[Block] = []
    stream_row = 0
    for index, file in enumerate(files):
        parts = _parts(Path(file.source.path), block_bytes)
        blocks += [Block(index, part, stream_row) for part in parts]
        stream_row += sum(part.num_rows for part in parts)
    return tuple(blocks)


def _parts(path: Path, block_bytes: int) -> list[Part]:
    try:
        cut = _row_group_parts if path.suffix.lower() == ".parquet" else _line_parts
        return list(cut(path, block_bytes))
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror or error}") from error


def _row_group_parts(path: Path, block_bytes: int) -> Iterator[Part]:
    first = 1
    with pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            meta = file.metadata.row_group(group)
            rows = meta.num_rows
            size = min(_MOST_ROWS, max(1, rows * block_bytes // max(1, meta.total_byte_size)))
            for skip in range(0, rows, size):
                yield ParquetRows(group, skip, first + skip, min(size, rows - skip))
            first += rows


def _line_parts(path: Path, block_bytes: int) -> Iterator[Part]:
    start, first = 0, 1
    with path.open("rb") as file:
        for stop, num_lines in _line_ends(file, block_bytes):
            yield Lines(start, stop, first, num_lines)
            start, first = stop, first + num_lines


def _line_ends(file: BinaryIO, block_bytes: int) -> Iterator[tuple[int, int]]:
    """End of each block of lines, and its number of lines; a last line without an end counts."""
    start = position = lines = 0
    ends_whole = True
    while chunk := file.read(block_bytes):
        last = chunk.rfind(b"\n") + 1
        if last and position + last - start >= block_bytes // 2:
            yield position + last, lines + chunk.count(b"\n")
            start, lines = position + last, 0
        else:
            lines += chunk.count(b"\n")
        position += len(chunk)
        ends_whole = chunk.endswith(b"\n")
    if position > start:
        yield position, lines + (not ends_whole)
