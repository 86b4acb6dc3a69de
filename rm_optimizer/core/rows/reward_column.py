"""Copies of files of responses with the column `reward` added, in bounded memory."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rm_optimizer.core.rows.response_files import REWARD, FileKind, stored_rows
from rm_optimizer.records.files import csv_table

BATCH_ROWS = 512
_SURROGATE = re.compile("[\ud800-\udfff]")


def write_with_rewards(source: Path, target: IO[bytes], kind: FileKind, rewards: Iterable[Any]) -> None:
    """Copy a file with the column `reward` added; its own cells stay as they are, also those a spreadsheet would run.

    Args:
        source: the file that was scored.
        target: open for writing bytes.
        kind: format to write: the source's own, or JSONL.
        rewards: a number, or a list of numbers, for each row in order.
    """
    if kind is FileKind.parquet:
        _write_parquet(source, target, iter(rewards))
        return
    rows = ({**row, REWARD: reward} for (_, row), reward in zip(stored_rows(source), rewards, strict=True))
    text = io.TextIOWrapper(target, encoding="utf-8", newline="")
    if kind is FileKind.csv:
        first = next(rows)
        table = csv_table(text, [*first])
        table.writeheader()
        table.writerows(chain([first], rows))
    else:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, default=str)
            # Half of a surrogate pair in a column that is not scored can be written as an escape only.
            text.write((json.dumps(row, default=str) if _SURROGATE.search(line) else line) + "\n")
    text.flush()
    text.detach()


def _write_parquet(source: Path, target: IO[bytes], rewards: Iterator[Any]) -> None:
    listed = "responses" in pq.read_schema(source).names
    kind = pa.list_(pa.float32()) if listed else pa.float32()
    writer: Any = None
    for batch in pq.ParquetFile(source).iter_batches(batch_size=BATCH_ROWS):
        values: Sequence[Any] = list(islice(rewards, batch.num_rows))
        scored = batch.append_column(pa.field(REWARD, kind), pa.array(values, kind))
        writer = writer or pq.ParquetWriter(target, scored.schema)
        writer.write_batch(scored)
    if writer is not None:
        writer.close()
