"""Scoring of a file of responses, which adds a `reward` column.

It works in chunks and continues after a kill. Rewards are appended to `OUT.partial` next to the output as they are
computed. Once every row has one, the input is read again, and the output is written under a temporary name and renamed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.layouts import Layout
from rm_optimizer.core.pairs.pair import Prompt, digest
from rm_optimizer.core.rows.readers import row_unit
from rm_optimizer.core.streaming.workers import map_chunks
from rm_optimizer.core.tokens.chat import Encoding
from rm_optimizer.errors import DataError
from rm_optimizer.evaluation.response_files import REWARD, FileKind, ResponseRow, file_kind, read_responses, stored_rows
from rm_optimizer.records.files import as_path, csv_table, replacing
from rm_optimizer.records.ledger import Ledger, open_ledger

Reward: TypeAlias = float | list[float]
"""A row's reward: a number, or a list if the row has a list of responses."""
_BATCH_ROWS = 512
_READING = 2
"""Version of the rule by which rows are read; rewards of another are not continued."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class CountedRewards:
    """Rewards of responses, and counts of those that were cut.

    Args:
        rewards: one reward for each response, in order.
        num_prompt_cut: number of responses whose prompt lost tokens; None if the scorer does not count them.
        num_response_cut: number of responses that lost tokens themselves; None if the scorer does not count them.
    """

    rewards: list[float]
    num_prompt_cut: int | None
    num_response_cut: int | None


def cut_counts(encodings: Sequence[Encoding]) -> tuple[int, int]:
    """Numbers of responses whose prompt and which themselves lost tokens."""
    return sum(one.prompt_cut > 0 for one in encodings), sum(one.response_cut > 0 for one in encodings)


@runtime_checkable
class CountingScorer(Protocol):
    """Scorer that counts cut responses."""

    def score_counted(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> CountedRewards:
        """Rewards in the given order, and counts of cut responses."""
        ...


def score_counted(
    scorer: Scorer | CountingScorer, prompts: Sequence[Prompt], responses: Sequence[str], *, token_budget: int = 16384
) -> CountedRewards:
    """Rewards in the given order, and counts of cut responses, which models in this process and ensembles give.

    Each response is encoded once.

    Args:
        scorer: scorer of the responses.
        prompts: text or messages.
        responses: one response for each prompt.
        token_budget: most tokens of one forward pass of a model, padding included.

    Raises:
        ValueError: if the numbers of prompts and responses differ.
    """
    if isinstance(scorer, BradleyTerryRM):
        encodings = scorer.encode(prompts, responses)
        rewards = scorer.score_encoded(encodings, token_budget=token_budget)
        return CountedRewards(rewards.tolist(), *cut_counts(encodings))
    if isinstance(scorer, CountingScorer):
        return scorer.score_counted(prompts, responses)
    return CountedRewards(scorer.score(prompts, responses).tolist(), None, None)


@dataclass(frozen=True)
class ScoredFile:
    """Result of scoring a file.

    Args:
        num_rows: number of rows.
        num_responses: number of responses in these rows.
        num_prompt_cut: number of responses whose prompt lost tokens; None if the scorer does not count them.
        num_response_cut: number of responses that lost tokens themselves; None if the scorer does not count them.
    """

    num_rows: int
    num_responses: int
    num_prompt_cut: int | None
    num_response_cut: int | None


def score_file(
    scorer: Scorer | CountingScorer,
    source: Path | str,
    target: Path | str,
    *,
    scorer_name: str,
    token_budget: int = 16384,
    layout: object = None,
    chunk_rows: int = 256,
    num_workers: int | None = None,
    on_progress: Callable[[int], None] = lambda rows: None,
) -> ScoredFile:
    """Score every row of a file.

    A repeated call after a kill continues after the last whole chunk. Its output equals that without a kill
    bit for bit, and with workers for any number of them.

    Args:
        scorer: scorer of the responses.
        source: JSONL (also .gz), CSV or Parquet with columns `prompt` and `response`, or `prompt` and a list
            `responses`.
        target: path of a file that does not exist yet, in the source's format or JSONL.
        scorer_name: identity of this scorer, so that rewards of another scorer are never continued; for a model, the
            digest of its weights and options (`identity.scorer_digest`), not its path.
        token_budget: most tokens of one forward pass of a model, padding included.
        layout: columns, parsed columns and encoding of the source, as the option `layout` has them.
        chunk_rows: number of rows scored and saved together.
        num_workers: actors on Ray, with one thread or one GPU each; None scores in this process.
        on_progress: function called with the number of rows done; at the start, the rows of an earlier call count.

    Raises:
        DataError: if a file or row is unusable, or the partial file belongs to another input or scorer.
        CheckpointError: if a reward is not finite.
    """
    source, target = as_path("source", source), as_path("target", target)
    if file_kind(target) not in (file_kind(source), FileKind.jsonl):
        raise DataError(f"{target}: expected the format of {source.name}, or .jsonl")
    require_new(target)
    form = Layout.of(layout)
    num_rows = sum(1 for _ in read_responses(source, form))  # every row is checked before the first is scored
    if not num_rows:
        raise DataError(f"{source}: there are no rows to score")
    content = _content_digest(source)
    kept = target.with_name(f"{target.name}.partial")
    identity = digest([_READING, content, scorer_name, chunk_rows, form.to_dict()])
    other = "scores of another input, layout, model, length limit, chunk size or version"
    with open_ledger(kept, identity, other=other) as log:
        done = sum(len(chunk["rewards"]) for chunk in log.values())
        on_progress(done)
        looked_at = replace(form, parse=form.parse or ())  # with the same reading and no further warning
        chunks = _Chunks(source.resolve(), looked_at, done, chunk_rows)
        compute = partial(_scored, source=source, token_budget=token_budget)
        for entry in map_chunks(compute, scorer, chunks, num_workers):
            log.append(entry)
            done += len(entry["rewards"])
            on_progress(done)
        if _content_digest(source) != content:
            raise DataError(f"{source}: was changed while it was scored; remove {kept} and score it again")
        _write_target(source, target, log, form.encoding)
        result = summed_counts({"num_rows": len(chunk.pop("rewards")), **chunk} for chunk in log.values())
        kept.unlink()
    return result


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a file's rows from one on, read by each iteration."""

    source: Path
    form: Layout
    first: int
    num_rows: int

    def __iter__(self) -> Iterator[list[ResponseRow]]:
        rows = islice(read_responses(self.source, self.form), self.first, None)
        return iter(lambda: list(islice(rows, self.num_rows)), [])


def require_new(target: Path) -> None:
    """Refuse an output file that exists, or whose folder is missing.

    Raises:
        DataError: if either is so.
    """
    if target.exists():
        raise DataError(f"{target}: is there already; remove it or name another file")
    if not target.parent.is_dir():
        raise DataError(f"{target}: its folder does not exist; create {target.parent}")


def _content_digest(source: Path) -> str:
    """Digest of the file's bytes, without its path and its time."""
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scored(
    scorer: Scorer | CountingScorer, chunk: Sequence[ResponseRow], source: Path, token_budget: int
) -> dict[str, Any]:
    """Entry of a chunk in the log.

    It has each row's reward, and the counts of cut responses if they are known.
    """
    prompts = [row.prompt for row in chunk for _ in row.responses]
    responses = [response for row in chunk for response in row.responses]
    counted = score_counted(scorer, prompts, responses, token_budget=token_budget)
    rewards = _of_rows(counted.rewards, chunk, source)
    return {**vars(counted), "rewards": rewards, "num_responses": len(responses)}


def _of_rows(rewards: Sequence[float], chunk: Sequence[ResponseRow], source: Path) -> list[Reward]:
    numbers = [row.number for row in chunk for _ in row.responses]
    require_finite(rewards, lambda index: f"{source}, {row_unit(source)} {numbers[index]}")
    values, found = iter(rewards), list[Reward]()
    for row in chunk:
        own = list(islice(values, len(row.responses)))
        found.append(own if row.listed else own[0])
    return found


def summed_counts(pieces: Iterable[Mapping[str, int | None]]) -> ScoredFile:
    """Sums of the counts of a file's pieces.

    They are by the fields of `ScoredFile`; a count that a piece lacks is None.
    """
    each = [*pieces]
    columns = {field.name: [piece.get(field.name) for piece in each] for field in fields(ScoredFile)}
    sums: dict[str, Any] = {name: None if None in counts else sum(counts) for name, counts in columns.items()}
    return ScoredFile(**sums)


def _write_target(source: Path, target: Path, log: Ledger, encoding: str | None) -> None:
    """Write the output under a temporary name and rename it."""
    with replacing(target) as temporary, temporary.open("wb") as raw:
        rewards = (reward for chunk in log.values() for reward in chunk["rewards"])
        is_packed = target.name.endswith(".gz")
        packed: Any = gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) if is_packed else nullcontext(raw)
        with packed as file:
            _write_with_rewards(source, file, file_kind(target), rewards, encoding)
        raw.flush()
        os.fsync(raw.fileno())


def _write_with_rewards(
    source: Path, target: IO[bytes], kind: FileKind, rewards: Iterable[Any], encoding: str | None
) -> None:
    """Copy a file with the column `reward` added; its own cells stay as they are, also those a spreadsheet would run.

    Args:
        source: the file that was scored.
        target: open for writing bytes.
        kind: format to write: the source's own, or JSONL.
        rewards: a number, or a list of numbers, for each row in order.
        encoding: encoding of the source; the copy is in UTF-8.
    """
    if kind is FileKind.parquet:
        table, given = pq.ParquetFile(source), iter(rewards)
        first = next(given)
        given = chain([first], given)
        field = pa.field(REWARD, pa.list_(pa.float32()) if isinstance(first, list) else pa.float32())
        with pq.ParquetWriter(target, table.schema_arrow.append(field)) as writer:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                values = pa.array(list(islice(given, batch.num_rows)), field.type)
                writer.write_batch(batch.append_column(field, values))
        return
    rows = ({**row, REWARD: reward} for (_, row), reward in zip(stored_rows(source, encoding), rewards, strict=True))
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
