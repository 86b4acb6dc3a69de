"""Logs that continue after a kill, and the progress that they hold."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import locked, naming

SECONDS_BETWEEN_LINES = 60.0
"""Seconds between two lines if there is no terminal."""

OnProgress = Callable[[int, int | None], None]
"""Function of the number of units done and of the number of all, which is None if unknown."""


def no_progress(done: int, total: int | None) -> None:
    """Show nothing."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[OnProgress]:
    """Show the progress of a computation while the block runs.

    Args:
        what: the computation, such as "scoring".
        unit: counted unit, such as "rows".
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        started = last = time.monotonic()

        def print_line(done: int, total: int | None) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= SECONDS_BETWEEN_LINES:
                last = now
                print(f"{what}: {_count(done, total, unit)}, {now - started:.0f} s", file=sys.stderr, flush=True)

        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, count="")

        def show(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, count=_count(done, total, unit))

        yield show


@contextmanager
def stages(*, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs, and yield the function that moves it.

    Its arguments are the name of the present stage, the amount done, the whole amount or None, and maybe a remark.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[remark]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=not shown)
    with bar:
        task = bar.add_task("loading", total=None, remark="")
        yield lambda what, done, total, remark="": bar.update(
            task, description=what, completed=done, total=total, remark=remark
        )


def _count(done: int, total: int | None, unit: str) -> str:
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


class Ledger:
    """File with one JSON line for each piece, below a header that identifies the computation; `open_ledger` opens it.

    Args:
        path: path of the file.
        file: the file, open for reading and writing, at the end of its last whole line.
        header: first line of the file; `append` writes it if `file` is at its start.
    """

    def __init__(self, path: Path, file: IO[bytes], header: bytes) -> None:
        self._path, self._file, self._header = path, file, header

    def values(self) -> Iterator[Any]:
        """The pieces as JSON values, first to last.

        Raises:
            DataError: if a line is damaged.
        """
        if self._file.tell():
            yield from read_ledger(self._path)

    def append(self, value: Any) -> None:
        """Add a piece, a dataclass or JSON values; it is on the disk when this returns."""
        if not self._file.tell():
            self._file.truncate()
            self._file.write(self._header)
        self._file.write(json.dumps(json_values(value)).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def open_ledger(
    path: Path, identity: str, *, other: str, num_wanted: int | None = None, remedy: str = "remove it to start again"
) -> Iterator[Ledger]:
    """Open the ledger of a computation; it keeps the pieces of an earlier, stopped call but an incomplete last line.

    A finished ledger of another computation is replaced when the first piece is added.

    Args:
        path: the file, which only one process at a time may have open.
        identity: digest of everything that the pieces depend on.
        other: words for a computation of another identity, for the message.
        num_wanted: number of pieces of the whole computation; if None, no ledger counts as finished.
        remedy: remedy for the message.

    Raises:
        DataError: if the file holds part of another computation, another process holds it, or it cannot be written.
    """
    header = {"identity": identity} | ({} if num_wanted is None else {"num_wanted": num_wanted})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("r+b" if path.exists() else "w+b")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    with naming(path), file:
        if not locked(file):
            raise DataError(f"{path}: another process is writing it; wait until it has ended")
        ledger = Ledger(path, file, json.dumps(header).encode() + b"\n")
        first, *sizes = [*map(len, whole_lines(file))] or [0]
        file.seek(0)
        found = file.read(first)
        if found == ledger._header:
            file.seek(first + sum(sizes))
            file.truncate()
        elif 0 < len(sizes) < _num_wanted(found):
            raise DataError(f"{path}: holds {other}; {remedy}")
        else:
            file.seek(0)
        try:
            yield ledger
        finally:
            if not os.fstat(file.fileno()).st_size:  # nothing was measured
                with suppress(PermissionError):  # Windows cannot remove open files
                    path.unlink(missing_ok=True)


def read_ledger(path: Path) -> Iterator[Any]:
    """Pieces of a ledger as JSON values, first to last, even while a process has it open.

    Raises:
        DataError: if the file cannot be read, is no ledger, or has a damaged line.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(whole_lines(lines), start=1):
                value = json.loads(line)
                if number > 1:
                    yield value
                elif not (isinstance(value, dict) and "identity" in value):
                    raise DataError(f"{path}, line 1: expected the header of a file that rm-opt keeps; name another")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{path}, line {number}: is damaged; bring back a copy of the file, or remove it") from error


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a file without an incomplete last line, which a kill may leave."""
    return takewhile(lambda line: line.endswith(b"\n"), file)


def _num_wanted(header: bytes) -> float:
    """Number of pieces of the whole computation according to its header; infinite if the header has none."""
    try:
        return float(json.loads(header)["num_wanted"])
    except (ValueError, TypeError, KeyError):
        return math.inf
