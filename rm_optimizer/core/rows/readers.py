"""Rows of a file or data set, one at a time, each with the number a person would look it up by.

Lines are counted from 1 in JSON Lines and CSV files, rows from 1 in all others. A row that cannot be read, in a file
whose other rows can, goes to a `report` callback, which raises or takes note; a file that cannot be read raises.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rm_optimizer.errors import DataError, did_you_mean, nearest
from rm_optimizer.records.codec import RepeatedKey, strict_json

Row: TypeAlias = dict[str, Any]
"""Column names to Python values."""
Report: TypeAlias = Callable[[int, str], None]
"""Function of the number of a bad row and the reason."""
FoundT = TypeVar("FoundT")
_Reader: TypeAlias = Callable[[Path, Report, str | None], Iterator[tuple[int, Row]]]

_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?::(?P<config>[^:]*))?(?::(?P<split>.*))?")
_HIDDEN = re.compile(r"[._]").match
_ROWS_AT_ONCE = 4096
_LONGEST_FIELD = 2**31 - 1
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_PACKED = (".gz", ".zst")
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv")


def read_rows(source: str | Path, report: Report, encoding: str | None = None) -> Iterator[tuple[int, Row]]:
    """Numbered rows of a file, a saved `datasets` folder or a `datasets` hub name.

    Files are Parquet, JSON (an array of objects), JSON Lines, or CSV or TSV with a header; all but Parquet may be
    packed by gzip or zstd. A hub name is `owner/name` or `owner/name:config:split`, where either part may be empty;
    what exists on disk, ends like a file or lies in a folder that exists is never looked up on the hub.

    Args:
        source: path or name.
        report: function called for rows that cannot be read.
        encoding: encoding of a text file; None is UTF-8, or UTF-16 where the file begins with its byte-order mark.

    Raises:
        DataError: if the source does not exist or cannot be read; the text names the file, and the line where known.
    """
    location = str(source)
    path = Path(location).expanduser()
    if path.is_dir():
        return _saved_folder(path)
    if path.exists():
        return guarded(path, _file_reader(path)(path, report, encoding))
    if is_hub_name(location):
        return _hub(location)
    if not path.parent.is_dir():
        raise DataError(f"{location}: no such file; the folder {path.parent} does not exist")
    told = f"nothing in {path.parent.resolve()} has a similar name"
    for near in nearest(path.name, [entry.name for entry in path.parent.iterdir()], 0.5)[:1]:
        told = f"did you mean '{path.parent / near}'?"
    raise DataError(f"{location}: no such file; {told}")


def each(
    rows: Iterable[tuple[int, Row]], function: Callable[[Row], FoundT], report: Report
) -> Iterator[tuple[int, FoundT]]:
    """Results of a function of the rows, each with the number of its row.

    Args:
        rows: numbered rows.
        function: function of a row that raises a `ValueError` for a bad one.
        report: function called with the reason of each bad row.
    """
    for number, row in rows:
        try:
            found = function(row)
        except (ValueError, RecursionError) as error:
            report(number, "its values are nested too deeply" if isinstance(error, RecursionError) else str(error))
        else:
            yield number, found


def refusing(source: str | Path) -> Callable[[int, str], NoReturn]:
    """Function that raises the error of a row of a source, with a remedy if its reason has none."""

    def refuse(number: int, reason: str) -> NoReturn:
        remedy = "" if ";" in reason else "; repair it or leave the row out"
        raise DataError(f"{source}, {row_unit(source)} {number}: {reason}{remedy}")

    return refuse


def row_unit(source: str | Path) -> str:
    """Unit of the numbers of a source's rows: "line" or "row"."""
    return "line" if _suffix(Path(source)) in _LINES else "row"


def source_name(source: str | Path) -> str:
    """Short name of a source: a file's or folder's name without endings, a hub name without configuration and split.

    Example:
        >>> source_name("data/hh_train.jsonl.gz"), source_name("Anthropic/hh-rlhf::train")
        ('hh_train', 'Anthropic/hh-rlhf')
    """
    if is_hub_name(str(source)):
        return str(source).partition(":")[0]
    name, suffix = _unpacked(Path(source).name), _suffix(Path(source))
    return name.removesuffix(suffix) if suffix in _READERS else name


def is_hub_name(location: str) -> bool:
    """True if text is the name of a hub data set and not a path."""
    if (found := _HUB_NAME.fullmatch(location)) is None or Path(location).expanduser().exists():
        return False
    return _suffix(name := Path(found["name"])) not in _READERS and not name.parent.is_dir()


def _unpacked(name: str) -> str:
    """Name of a file without the ending of its compression."""
    return name.removesuffix(next(filter(name.lower().endswith, _PACKED), ""))


def _suffix(path: Path) -> str:
    """Suffix of the file's kind, before its compression's."""
    return Path(_unpacked(path.name.lower())).suffix


def _file_reader(path: Path) -> _Reader:
    suffix, is_packed = _suffix(path), path.name.lower().endswith(_PACKED)
    if suffix not in _READERS or (suffix == ".parquet" and is_packed):
        shown = "".join(path.suffixes[-2:]) if is_packed else path.suffix
        remedy = f"; {_REMEDIES[suffix]}" if suffix in _REMEDIES else ""
        raise DataError(f"{path}: {did_you_mean('kind of file', shown, [*_READERS, *_GZIPPED])}{remedy}")
    if not path.is_file():
        raise DataError(f"{path}: expected a file, got a pipe or device, which is read once only; write it to a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    return _READERS[suffix]


def guarded(path: Path, rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """Yield the rows, with one sentence for every kind of damaged file.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        yield from rows
    except UnicodeDecodeError as error:
        told = "name its encoding by a layout such as {encoding: latin1}, or convert it: iconv -f latin1 -t utf-8 A > B"
        raise DataError(f"{path}: the file is not UTF-8 text ({error.reason} at byte {error.start}); {told}") from error
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{path}: the file cannot be read: {reason}") from error


def _open(path: Path, encoding: str | None) -> gzip.GzipFile | io.BufferedReader | io.BytesIO:
    """The bytes of a file, unpacked and in UTF-8; a file in another encoding is held in memory."""
    name = path.name.lower()
    file = gzip.GzipFile(path, "rb") if name.endswith(".gz") else path.open("rb")
    if name.endswith(".zst"):
        file = io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
    elif encoding is None and isinstance(file, io.BufferedReader) and file.peek(2)[:2] in _UTF_16:
        encoding = "utf-16"
    if encoding is None:
        return file
    with file:
        return io.BytesIO(file.read().decode(encoding).encode())


def _parquet(path: Path, report: Report, encoding: str | None) -> Iterator[tuple[int, Row]]:
    with pq.ParquetFile(path) as file:
        require_distinct_columns(path, file.schema_arrow.names)
        rows = (row for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE) for row in batch.to_pylist())
        yield from enumerate(rows, 1)


def _batched_rows(batches: Iterable[Mapping[str, Sequence[Any]]]) -> Iterator[tuple[int, Row]]:
    """Numbered rows of columns, a few thousand rows at a time."""
    rows = (dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True))
    return enumerate(rows, 1)


def require_distinct_columns(path: Path, names: Sequence[str]) -> None:
    """Refuse a table that has two columns of one name, of which only one would be read.

    Raises:
        DataError: naming the file and the column.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: there are two columns '{twice[0]}'; rename or remove one")


def _json_lines(path: Path, report: Report, encoding: str | None) -> Iterator[tuple[int, Row]]:
    with _open(path, encoding) as lines:
        yield from parse_lines(path, lines, report)


def parse_lines(
    path: Path, lines: Iterable[bytes], report: Report, *, first_line: int = 1
) -> Iterator[tuple[int, Row]]:
    """Numbered rows of lines that each hold a JSON object; blank lines are counted and give none.

    Args:
        path: the file the lines come from.
        lines: its lines, or a part of them.
        report: function called for lines that hold none.
        first_line: number of the first of these lines.

    Raises:
        DataError: if the file is a JSON array.
    """
    for number, line in enumerate(lines, first_line):
        if line.isspace():
            continue
        if number == 1 and line.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
            raise DataError(f"{path}, line 1: expected one JSON object a line, got a JSON array; name the file .json")
        try:
            row = strict_json(line)
        except json.JSONDecodeError as error:
            report(number, f"not a valid JSON object on one line ({error.msg} at column {error.colno})")
        except UnicodeDecodeError as error:
            told = "name another encoding by a layout such as {encoding: latin1}"
            report(number, f"not UTF-8 text ({error.reason} at byte {error.start}); {told}")
        except (RecursionError, ValueError) as error:
            report(number, f"not a JSON object that can be read ({_unreadable(error)})")
        else:
            yield from each([(number, row)], _object, report)


def _unreadable(error: RecursionError | ValueError) -> str:
    """Reason why valid JSON cannot be read: a key given twice, and Python's bounds of depth and of digits."""
    if isinstance(error, RepeatedKey):
        return str(error)
    return "its values are nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _object(row: Any) -> Row:
    if isinstance(row, dict):
        return row
    raise ValueError(f"expected a JSON object, got {type(row).__name__}")


def _json(path: Path, report: Report, encoding: str | None) -> Iterator[tuple[int, Row]]:
    """An array of objects, alone or as `{"data": […]}`; one object, one a line, or lists of cells by column too."""
    with _open(path, encoding) as file:
        content = file.read()
    try:
        rows = strict_json(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"{"):
            yield from parse_lines(path, io.BytesIO(content), report)
            return
        raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}: the file cannot be read: {_unreadable(error)}") from error
    if isinstance(rows, dict):
        lists = [cells for cells in rows.values() if isinstance(cells, list)]
        is_flat = not any(isinstance(cell, dict | list) for cells in lists for cell in cells)
        if is_flat and len(lists) == len(rows) and len({*map(len, lists)}) == 1:
            rows = [dict(zip(rows, cells, strict=True)) for cells in zip(*lists, strict=True)]
        else:
            rows = rows["data"] if isinstance(rows.get("data"), list) else [rows]
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a JSON array of objects, got {type(rows).__name__}")
    yield from each(enumerate(rows, 1), _object, report)


def _csv(path: Path, report: Report, encoding: str | None) -> Iterator[tuple[int, Row]]:
    """Rows with the line that each starts on; blank lines are left out."""
    delimiter, expected = ("\t", "tabs") if _suffix(path) == ".tsv" else (",", "commas")
    csv.field_size_limit(_LONGEST_FIELD)
    number, header = 1, list[str]()
    with io.TextIOWrapper(_open(path, encoding), encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                if not header and len(cells) == 1 and any(mark in cells[0] for mark in ",;\t"):
                    told = f"fields must be separated by {expected}, got the header {cells[0]!r}"
                    raise DataError(f"{path}, line 1: {told}")
                if not header:
                    header = cells
                    require_distinct_columns(path, header)
                elif len(cells) == len(header):
                    yield number, dict(zip(header, cells, strict=True))
                elif cells:
                    report(number, f"has {len(cells)} fields where the header has {len(header)}")
                number = reader.line_num + 1
        except csv.Error as error:
            told = f"a quoted field is not closed, or a quote in it is not doubled ({error})"
            raise DataError(f"{path}, line {number}: {told}") from error


_READERS: dict[str, _Reader] = {".parquet": _parquet, **dict.fromkeys((".jsonl", ".ndjson"), _json_lines)}
_READERS |= {".json": _json, **dict.fromkeys((".csv", ".tsv"), _csv)}
_GZIPPED = (".jsonl.gz", ".json.gz", ".csv.gz")
_REMEDIES = dict.fromkeys((".pkl", ".pickle", ".arrow", ".feather"), "write it with to_parquet")
_REMEDIES |= dict.fromkeys((".bz2", ".xz", ".zip"), "unpack it") | {".xlsx": "save it as CSV"}
"""Remedies for kinds of data files that are not read."""


class NamedFiles(NamedTuple):
    """The files of a source, or of each match of a pattern.

    Args:
        name: short name of their pairs' source.
        path: the source as it was named.
        files: paths of files, or a hub name.
        left_out: files of data in a folder that are not read.
    """

    name: str
    path: str
    files: list[str]
    left_out: list[str]


def require_files(source: str) -> None:
    """Look at the files of a source without reading them; a hub name is not looked up.

    Raises:
        DataError: if there is no such file or none to read, or one is damaged where it begins.
    """
    for file in (file for part in source_files(source) for file in part.files if not is_hub_name(file)):
        read_rows(file, lambda number, reason: None)  # it looks at the file, and reads rows once they are asked for


def source_files(source: str) -> list[NamedFiles]:
    """The files of a source: a file, a hub name, a folder of files or a pattern such as `sets/*.parquet`.

    Of a folder and those below it the files of all kinds are read: Parquet, JSON Lines, JSON and CSV. A file is left
    out if one of an earlier kind has the same name, and a JSON file next to Parquet or JSON Lines.

    Raises:
        DataError: if a folder holds no file of pairs, or a model, or nothing matches the pattern.
    """
    path = Path(source).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        if any((path / name).exists() for name in ("config.json", "adapter_config.json", "run.json")):
            told = "name a file of pairs (a command takes the model first: rm-opt evaluate MODEL --data PAIRS)"
            raise DataError(f"{source}: expected pairs, got the folder of a model or run; {told}")
        shown = [file for file in sorted(path.rglob("*")) if not any(map(_HIDDEN, file.relative_to(path).parts))]
        files = list[Path]()
        for reader in dict.fromkeys(_READERS.values()):
            names = {".json", *map(source_name, files)} if files else set[str]()
            kind = [file for file in shown if _READERS.get(_suffix(file)) is reader]
            files += [file for file in kind if names.isdisjoint({source_name(file), _suffix(file)})]
        if not files:
            raise DataError(f"{source}: the folder holds no Parquet, JSON Lines, JSON or CSV file")
        left_out = [file for file in shown if _suffix(file) in {*_READERS, *_REMEDIES} and file not in files]
        return [NamedFiles(path.resolve().name, source, [*map(str, files)], [*map(str, left_out)])]
    if path.exists() or not glob.has_magic(source):
        return [NamedFiles(source_name(source), source, [source], [])]
    if not (matches := sorted(glob.glob(str(path), recursive=True))):
        raise DataError(f"{source}: no file matches this pattern")
    return [part for match in matches for part in source_files(match)]


def _saved_folder(path: Path) -> Iterator[tuple[int, Row]]:
    if (splits := path / "dataset_dict.json").exists():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise DataError(f"{path}: the folder holds the splits {', '.join(names)}; name one, such as {path / names[0]}")
    if not (path / "state.json").exists():
        files = ", ".join(sorted(entry.name for entry in path.iterdir() if _suffix(entry) in _READERS)[:8]) or "none"
        raise DataError(f"{path}: the folder was not written by datasets' save_to_disk; name one of its files: {files}")
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the saved data set cannot be read: {error}") from error
    return guarded(path, _batched_rows(dataset.iter(batch_size=_ROWS_AT_ONCE)))


def _hub(location: str) -> Iterator[tuple[int, Row]]:
    import datasets

    from rm_optimizer.records.hub import hub_obstacle, restored_hub

    found = _HUB_NAME.fullmatch(location)
    assert found is not None, location
    name, config, split = found["name"], found["config"] or None, found["split"] or None
    try:
        with restored_hub():
            if (obstacle := hub_obstacle(name, "dataset")) is not None:
                raise DataError(f"{location}: neither a file here nor a data set the hub gives: {obstacle}")
            try:
                loaded = datasets.load_dataset(name, config, split=split)
            except RuntimeError:  # a data set by a script, which `datasets` 4.0 refuses; the hub has it as Parquet
                files = f"hf://datasets/{name}@refs/convert/parquet/{config or '*'}/{split or '*'}/*.parquet"
                loaded = datasets.load_dataset("parquet", data_files=files, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{location}: neither a file here nor a data set the hub gives: {reason}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if len(loaded) > 1:
            choice = f"{name}:{config or ''}:{next(iter(loaded))}"
            raise DataError(f"{location}: the data set has the splits {', '.join(loaded)}; name one, such as {choice}")
        loaded = next(iter(loaded.values()))
    return _batched_rows(loaded.iter(batch_size=_ROWS_AT_ONCE))
