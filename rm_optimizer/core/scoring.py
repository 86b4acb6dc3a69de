"""A file of responses in, the same file with a `reward` column out: streaming, and continued after a kill.

Rewards are appended to `OUT.partial` beside the output as they are computed, one JSON line a row. Once every row has
one, the input is read a second time and the output is written under a temporary name and renamed.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from rm_optimizer.core.base import Scorer, digest
from rm_optimizer.core.files import replacing
from rm_optimizer.core.readers import row_unit
from rm_optimizer.core.response_files import (
    FileKind,
    ResponseRow,
    file_kind,
    read_responses,
    write_with_rewards,
)
from rm_optimizer.errors import CheckpointError, DataError

Reward: TypeAlias = float | list[float]
"""A row's reward: a number, or a list where the row has a list of responses."""


def require_finite(rewards: Sequence[float], name: Callable[[int], str]) -> None:
    """Refuse rewards that are NaN or infinite; called wherever rewards are about to be printed or written.

    Args:
        rewards: of one model, in any order.
        name: names the reward at an index for the message, such as `response 3`.

    Raises:
        CheckpointError: saying how many they are, and the first one.
    """
    broken = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
    if broken:
        first = broken[0]
        raise CheckpointError(
            f"{len(broken)} of {len(rewards)} rewards are not finite, the first is {rewards[first]} for {name(first)}: "
            "the model's weights are broken, or overflow in the type it computes in; give another checkpoint"
        )


def score_file(
    scorer: Scorer,
    source: Path,
    target: Path,
    *,
    scorer_name: str,
    chunk_rows: int = 256,
    on_progress: Callable[[int], None] = lambda rows: None,
) -> int:
    """Score every row of a file and return how many there are.

    Repeating the call after a kill continues after the last whole chunk, and the output is the same, bit for bit, as
    that of an uninterrupted call.

    Args:
        scorer: what gives the rewards.
        source: JSONL (also .gz), CSV or Parquet with columns `prompt` and `response`, or `prompt` and a list
            `responses`.
        target: a file that is not there yet, in the source's format or JSONL.
        scorer_name: tells this scorer from others, so that no rewards of another are continued.
        chunk_rows: rows scored and saved together.
        on_progress: called with the rows done so far, once at the start with those of an earlier call.

    Raises:
        DataError: if a file or row is unusable, or the partial file belongs to another input or scorer.
        CheckpointError: if a reward is not finite.
    """
    _check_target(source, target)
    num_rows = sum(1 for _ in read_responses(source))  # every row is checked before the first is scored
    if not num_rows:
        raise DataError(f"{source}: there are no rows to score")
    partial = target.with_name(f"{target.name}.partial")
    identity = _identity(source, scorer_name, chunk_rows)
    done = _continue_partial(partial, identity, chunk_rows)
    on_progress(done)
    with partial.open("ab") as log:
        for chunk in _chunks(islice(read_responses(source), done, None), chunk_rows):
            log.write(
                b"".join(
                    json.dumps(reward, allow_nan=False).encode() + b"\n" for reward in _rewards(scorer, chunk, source)
                )
            )
            log.flush()
            os.fsync(log.fileno())
            done += len(chunk)
            on_progress(done)
    _write_target(source, target, partial)
    return num_rows


def _check_target(source: Path, target: Path) -> None:
    """Refuse what could only fail after all the scoring."""
    kind = file_kind(target)
    if kind not in (file_kind(source), FileKind.jsonl):
        raise DataError(f"{target}: expected the format of {source.name}, or .jsonl")
    if target.exists():
        raise DataError(f"{target}: is there already; remove it or name another file")
    if not target.parent.is_dir():
        raise DataError(f"{target}: its folder does not exist; create {target.parent}")


def _identity(source: Path, scorer_name: str, chunk_rows: int) -> str:
    """Digest of what the rewards depend on; name, size and modification time stand for the source's content."""
    state = source.stat()
    return digest([str(source.resolve()), state.st_size, state.st_mtime_ns, scorer_name, chunk_rows])


def _continue_partial(partial: Path, identity: str, chunk_rows: int) -> int:
    """Cut the partial file after its last whole chunk, or start it, and return the rows it holds."""
    header = json.dumps({"identity": identity}).encode() + b"\n"
    try:
        with partial.open("r+b" if partial.exists() else "w+b") as log:
            first = log.readline()
            if first.endswith(b"\n") and first != header:
                raise DataError(f"{partial}: belongs to another input, model or chunk size; remove it to start again")
            if first != header:
                log.seek(0)
                log.write(header)
            rows = _whole_chunks(log, chunk_rows)
            log.truncate()
            return rows
    except OSError as error:
        raise DataError(f"{partial}: cannot be written ({error.strerror})") from error


def _whole_chunks(log: Any, chunk_rows: int) -> int:
    """Move to the end of the last whole chunk; rows in it and before."""
    rows, seen, end = 0, 0, log.tell()
    while log.readline().endswith(b"\n"):
        seen += 1
        if seen % chunk_rows == 0:
            rows, end = seen, log.tell()
    log.seek(end)
    return rows


def _chunks(rows: Iterator[ResponseRow], size: int) -> Iterator[list[ResponseRow]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def _rewards(scorer: Scorer, chunk: Sequence[ResponseRow], source: Path) -> Iterator[Reward]:
    prompts = [row.prompt for row in chunk for _ in row.responses]
    responses = [response for row in chunk for response in row.responses]
    rewards = scorer.score(prompts, responses).tolist()
    numbers = [row.number for row in chunk for _ in row.responses]
    require_finite(rewards, lambda index: f"{source}, {row_unit(source)} {numbers[index]}")
    values = iter(rewards)
    for row in chunk:
        own = list(islice(values, len(row.responses)))
        yield own if row.listed else own[0]


def _write_target(source: Path, target: Path, partial: Path) -> None:
    """Write the output under a temporary name, rename it and drop the partial file."""
    with replacing(target) as temporary, temporary.open("wb") as raw, partial.open("rb") as log:
        next(log)
        rewards = (json.loads(line) for line in log)
        if target.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed:
                write_with_rewards(source, packed, file_kind(target), rewards)  # type: ignore[arg-type]
        else:
            write_with_rewards(source, raw, file_kind(target), rewards)
        raw.flush()
        os.fsync(raw.fileno())
    partial.unlink()
