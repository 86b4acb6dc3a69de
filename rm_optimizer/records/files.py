"""Writing of files and folders that are either whole or absent."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


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
    """Temporary path to write to, beside a file; the block's end renames it to the file, and an error removes it.

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
    """A new folder beside `folder`; the block's end renames it to `folder`, and an error removes it."""
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
