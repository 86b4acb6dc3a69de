"""Results of a long computation, appended chunk by chunk, that the same computation goes on from after a kill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rm_optimizer.errors import DataError
from rm_optimizer.records.files import naming


class ChunkLog:
    """One JSON line a chunk, after a header that says what computation they belong to; see `chunk_log`.

    Args:
        path: the file.
        file: it, open for reading and writing, at the end of the last whole line.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file

    def values(self) -> Iterator[Any]:
        """The chunks' values, first to last."""
        with self.path.open("rb") as lines:
            next(lines)
            for line in lines:
                yield json.loads(line)

    def append(self, value: Any) -> None:
        """Add a chunk; it is on the disk when this returns."""
        self._file.write(json.dumps(value, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def chunk_log(path: Path, identity: str, *, of_what: str) -> Iterator[ChunkLog]:
    """Open the log of a computation: what an earlier, stopped call left is kept, a torn last line is cut off.

    Args:
        path: the file, which one process at a time may hold.
        identity: digest of all that the values depend on.
        of_what: what the identity is made of, in words, for the message.

    Raises:
        DataError: if the file belongs to another computation, another process holds it, or it cannot be written.
    """
    try:
        file = path.open("r+b" if path.exists() else "w+b")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    with naming(path), file:
        if not _locked(file):
            raise DataError(f"{path}: another process is writing it; wait until it has ended")
        _go_on(path, file, json.dumps({"identity": identity}).encode() + b"\n", of_what)
        yield ChunkLog(path, file)


def _locked(file: IO[bytes]) -> bool:
    """Lock the file until it is closed or the process ends; False if another process has it."""
    if sys.platform == "win32":  # no advisory locks there
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _go_on(path: Path, file: IO[bytes], header: bytes, of_what: str) -> None:
    """Leave the file with the header and the whole lines after it, at its end."""
    first = file.readline()
    if first.endswith(b"\n") and first != header:
        raise DataError(f"{path}: belongs to another {of_what}; remove it to start again")
    if first != header:
        file.seek(0)
        file.write(header)
    end = file.tell()
    while file.readline().endswith(b"\n"):
        end = file.tell()
    file.seek(end)
    file.truncate()
