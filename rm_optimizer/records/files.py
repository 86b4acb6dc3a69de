"""Files: atomic writes, locks, and errors of the disk as sentences."""

from __future__ import annotations

import csv
import errno
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from rm_optimizer.errors import ConfigError, DiskError

REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or raise your quota,",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "give yourself permission to write",
    errno.EPERM: "give yourself permission to write",
}
"""Remedy for each error number that means a fault of the disk; other errors are bugs and are raised as they are."""


@contextmanager
def writing(path: Path, *, first_in: Path | None = None) -> Iterator[None]:
    """Turn an error of the system while writing into one sentence that names the path.

    Args:
        path: written path, which the sentence names.
        first_in: other folder where the file is written before it is moved to `path`, if there is one.

    Raises:
        DiskError: if the disk is full or read-only, or permission is missing.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        named, number = getattr(error, "filename", None), _error_number(error)
        is_elsewhere = isinstance(named, str) and not Path(named).is_relative_to(path.parent)
        if is_elsewhere and number in (errno.EACCES, errno.EPERM):  # a file that was perhaps only read
            raise
        if (found := disk_error(error, path, first_in)) is None:
            raise
        raise DiskError(f"{found} and go on with resume=auto in the same run folder") from error


def disk_error(error: Exception, path: Path | None = None, first_in: Path | None = None) -> DiskError | None:
    """The sentence for an error of the system while writing; None for any other error.

    Args:
        error: raised error.
        path: written path, which the sentence names; None means the file that the system reports.
        first_in: other folder where the file is written before it is moved to `path`, if there is one.
    """
    if not isinstance(error, OSError | SafetensorError) or (number := _error_number(error)) not in REMEDIES:
        return None
    named = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    written = path or named
    if written is None:
        return DiskError(f"a file cannot be written ({reason}); {REMEDIES[number]}")
    told = f"{written} cannot be written ({reason})"
    if named not in (None, written):
        told = f"{written} cannot be written ({named}: {reason})"
    folders = f"{written.parent} or {first_in}, where it is written first," if first_in else f"{written.parent}"
    return DiskError(f"{told}; {REMEDIES[number]} in {folders}")


def _error_number(error: OSError | SafetensorError) -> int:
    """The system's error number, which errors of safetensors contain only in their text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else 0


UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""
_HELD: set[tuple[Path, int]] = set()
log = logging.getLogger("rm_optimizer")


def locked(file: IO[Any] | int) -> bool:
    """Lock an open file or folder until it is closed or the process ends; False if another process has it.

    Raises:
        OSError: if the file system has no locks.
    """
    if sys.platform == "win32":  # no advisory locks there
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locked_if_possible(file: IO[Any] | int, folder: Path, work: str) -> bool:
    """Lock as `locked` does; if the file system has no locks, warn and return True.

    Args:
        file: an open file or folder.
        folder: folder that the lock protects.
        work: work that one process at a time does in the folder, for the warning.
    """
    try:
        return locked(file)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        text = "the file system of %s has no locks (%s); do not start a second %s in this folder"
        log.warning(text, folder, error.strerror, work)
        return True


@contextmanager
def held(folder: Path, work: str, *, remedy: str = "choose another output folder") -> Iterator[None]:
    """Hold a folder of results for this process; a folder made for it is removed if nothing was written.

    The folder itself is locked, so no file is left behind. A block inside, on the same thread, shares the lock.
    If the file system has no locks, it logs a warning and continues without one.

    Args:
        folder: the folder, made if missing.
        work: work that one process at a time does there, for the messages.
        remedy: last choice of the message for a folder in use.

    Raises:
        ConfigError: if another process holds it.
    """
    is_new, place = not folder.exists(), (folder.resolve(), threading.get_ident())
    if place in _HELD:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not locked_if_possible(descriptor, folder, work):
            raise ConfigError(
                f"{folder} is in use: another process writes an {work} there; wait for it, stop it, or {remedy}"
            )
        _HELD.add(place)
        remove_left(folder)
        yield
    finally:
        _HELD.discard(place)
        if is_new:
            with suppress(OSError):  # it holds results
                folder.rmdir()
        os.close(descriptor)


def sign(file: IO[str]) -> None:
    """Write the id and host of this process into a file that it has locked, for the messages of other processes."""
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Path of an argument.

    Raises:
        TypeError: if it is not one; the text names the argument.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {type(value).__name__}")
    return Path(value).expanduser()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Temporary path to write to, next to a file; the block's end renames it to the file, and an error removes it.

    Missing folders are made. An earlier file of that name remains until the new one is whole. A symbolic link remains,
    and the file that it points to is replaced. A device or pipe is written directly, since a rename would replace it by
    a file.

    Raises:
        OSError: if the file cannot be written.
    """
    if _is_written_through(path):
        with naming(path):
            yield path
        return
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder`; the block's end renames it to `folder`, and an error removes it."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    earlier = folder.with_name(f".{folder.name}.{os.getpid()}.earlier")
    try:
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            os.replace(folder, earlier)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


def remove_left(folder: Path) -> None:
    """Remove what killed processes left of `replacing` and `replacing_folder`; the caller holds the folder's lock.

    The earlier folder of a name stays if the new one is missing.
    """
    for path in folder.glob(".*.*.*"):
        name, process, ending = path.name[1:].rsplit(".", 2)
        is_left = ending in ("tmp", "writing") or (ending == "earlier" and (folder / name).exists())
        if process.isdigit() and int(process) != os.getpid() and is_left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_written_through(path: Path) -> bool:
    """True for a path that is neither a regular file nor a folder, or an open stream under a name of /dev."""
    if not path.exists():
        return False
    mode = path.stat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or path.absolute().parts[1:2] in (("dev",), ("proc",))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of the system in the block, since a write to an open file raises one without."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all.

    Raises:
        OSError: if the file cannot be written; an earlier file of that name then remains unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as Parquet, whole or not at all; a column that a row lacks is null there.

    Args:
        path: the file.
        rows: values by column; the columns are in the order of their first appearance.
    """
    import pyarrow as pa  # imported here so that the message for a mistyped option does not wait for it
    import pyarrow.parquet as pq

    columns = dict.fromkeys(name for row in rows for name in row)
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), temporary)
    return path


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON Lines, whole or not at all."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as CSV with a header, whole or not at all; a missing value or None is an empty cell.

    Args:
        path: the file.
        rows: values by column; the columns are in the order of their first appearance. A text that a spreadsheet would
            run as a formula gets an apostrophe in front, which `unquoted_formula` removes.
    """
    columns = dict.fromkeys(name for row in rows for name in row)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        table = csv_table(file, [*columns])
        table.writeheader()
        for row in rows:
            is_formula = {name: isinstance(cell, str) and _FORMULA.match(cell) for name, cell in row.items()}
            table.writerow({name: f"'{cell}" if is_formula[name] else cell for name, cell in row.items()})
    return path


_FORMULA = re.compile(r"(?![+-][\d.]+(?:e[+-]?\d+)?\Z)'*[=+\-@\t\r]")
"""Beginning of a text, other than a number, that a spreadsheet runs as a formula, or that an apostrophe protects."""


def unquoted_formula(cell: str) -> str:
    """A text cell as it was before `write_csv` put an apostrophe in front."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def csv_table(file: IO[str], columns: Sequence[str]) -> csv.DictWriter[str]:
    """Writer of CSV rows that end in a line feed; a missing value is an empty cell.

    A cell with a carriage return must be quoted, and `csv` quotes only the characters that end its rows. So the rows
    from `csv` end in both characters, and the carriage return is then removed.
    """
    return csv.DictWriter(_LineFeeds(file), columns, restval="", lineterminator="\r\n")


class _LineFeeds:
    """Text file that ends each row in a line feed alone."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(row.removesuffix("\r\n") + "\n")
