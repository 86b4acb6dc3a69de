from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, load_training_data
from rm_optimizer.core.rows.readers import is_hub_name, read_rows, row_unit, source_name
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.response_files import read_responses
from rm_optimizer.interfaces.inputs import PairOptions
from rm_optimizer.schema import DataConfig

ROWS = [{"prompt": "Hi", "chosen": 'Hello,\n"you"', "rejected": "ß"}, {"prompt": "Bye", "chosen": "b", "rejected": "c"}]


def rows_of(source: str | Path) -> list[tuple[int, dict[str, Any]]]:
    def refuse(number: int, reason: str) -> None:
        raise AssertionError(f"{number}: {reason}")

    return list(read_rows(source, refuse))


def reported(source: Path) -> tuple[list[int], list[tuple[int, str]]]:
    bad: list[tuple[int, str]] = []
    numbers = [number for number, _ in read_rows(source, lambda number, reason: bad.append((number, reason)))]
    return numbers, bad


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    quoted = ['"' + value.replace('"', '""') + '"' for row in rows for value in row.values()]
    lines = [",".join(quoted[i : i + 3]) for i in range(0, len(quoted), 3)]
    path.write_text("prompt,chosen,rejected\n" + "\n".join(lines) + "\n", encoding="utf-8")


def compressed(write: Callable[[Path, list[dict[str, Any]]], None]) -> Callable[[Path, list[dict[str, Any]]], None]:
    def write_compressed(path: Path, rows: list[dict[str, Any]]) -> None:
        write(path, rows)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return write_compressed


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
    "a.json": write_array,
    "a.json.gz": compressed(write_array),
    "a.jsonl": write_lines,
    "a.jsonl.gz": compressed(write_lines),
    "lines.json": write_lines,
    "A.CSV": write_csv,
    "a.csv.gz": compressed(write_csv),
    "folder": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_rows_that_were_written(name: str, tmp_path: Path):
    WRITERS[name](tmp_path / name, ROWS)
    read = rows_of(tmp_path / name)
    assert [row for _, row in read] == ROWS
    first, second = (2, 4) if "csv" in name.lower() else (1, 2)
    assert [number for number, _ in read] == [first, second]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path):
    for name in ("a.csv", "a.jsonl", "a.json"):
        WRITERS["A.CSV" if name == "a.csv" else name](tmp_path / name, ROWS)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
        assert [row for _, row in rows_of(tmp_path / name)] == ROWS


def test_nested_values_survive_parquet(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": "Hi"}], "scores": [1.0, 2.5]}
    pq.write_table(pa.Table.from_pylist([row] * 5000), tmp_path / "a.parquet")
    read = rows_of(tmp_path / "a.parquet")
    assert read[-1] == (5000, row)


def test_a_csv_line_with_a_wrong_number_of_fields_is_reported_by_its_physical_line(tmp_path: Path):
    (tmp_path / "a.csv").write_text('a,b\n"two\nlines",1\n\n1,2,3\n4,5\n')
    assert reported(tmp_path / "a.csv") == ([2, 6], [(5, "has 3 fields where the header has 2")])


@pytest.mark.parametrize("separator", [";", "\t"])
def test_another_separator_is_named(separator: str, tmp_path: Path):
    (tmp_path / "a.csv").write_text(f"prompt{separator}chosen\n1{separator}2\n")
    with pytest.raises(DataError, match=r"line 1: fields must be separated by commas"):
        rows_of(tmp_path / "a.csv")


def test_one_json_object_is_one_row(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=1))
    assert rows_of(tmp_path / "a.json") == [(1, ROWS[0])]


@pytest.mark.parametrize("text", ['a,b\n1,2\n3,"four\n5,6\n', 'a,b\n1,2\n3,"four\n5,"six"\n'])
def test_an_unclosed_quote_names_the_line_it_opens_on(text: str, tmp_path: Path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=r"a\.csv, line 3: a quoted field is not closed"):
        rows_of(tmp_path / "a.csv")


def test_a_repeated_csv_column_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match="there are two columns 'a'"):
        rows_of(tmp_path / "a.csv")


def test_bad_json_lines_are_reported_and_the_others_read(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n\xff\n{"a": 2}\n')
    numbers, bad = reported(tmp_path / "a.jsonl")
    assert numbers == [1, 6]
    assert [number for number, _ in bad] == [3, 4, 5]
    assert "not a valid JSON object" in bad[0][1]
    assert bad[1][1] == "expected a JSON object, got list"
    assert bad[2][1].startswith("not UTF-8 text")
    assert "layout such as {encoding: latin1}" in bad[2][1]


def test_a_json_syntax_error_names_the_line(tmp_path: Path):
    (tmp_path / "a.json").write_text('[\n{"a": 1},\n{"a": }\n]')
    with pytest.raises(DataError, match=r"a\.json, line 3: not valid JSON"):
        rows_of(tmp_path / "a.json")


def test_a_json_array_named_jsonl_is_told_its_name(tmp_path: Path):
    WRITERS["a.json"](tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"line 1: .* name the file \.json"):
        rows_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("damage", ["torn", "replaced"])
def test_a_torn_file_is_named(name: str, damage: str, tmp_path: Path):
    path = tmp_path / name
    WRITERS[name](path, ROWS)
    path.write_bytes(path.read_bytes()[:-12] if damage == "torn" else b"not what the name says")
    with pytest.raises(DataError, match=f"{name}: the file cannot be read: "):
        rows_of(path)


def test_text_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes("prompt,chosen\nä,ö\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv: the file is not UTF-8 text"):
        rows_of(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl", "a.csv"])
def test_an_empty_file_is_named(name: str, tmp_path: Path):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name}: the file is empty"):
        rows_of(tmp_path / name)


def test_a_pipe_is_named_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: expected a file, got a pipe or device"):
        rows_of(tmp_path / "a.jsonl")


def test_an_unknown_ending_gets_a_hint(tmp_path: Path):
    (tmp_path / "a.jsonlines").write_text("{}")
    with pytest.raises(DataError, match=r"unknown kind of file '\.jsonlines'; did you mean '\.jsonl'\?"):
        rows_of(tmp_path / "a.jsonlines")


def test_a_missing_file_gets_the_nearest_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs_train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for wrong in ("data/pair_train.parquet", "data/pairs_train", "./data/pairs_train.parqet"):
        with pytest.raises(DataError, match=r"no such file; did you mean 'data/pairs_train\.parquet'\?"):
            rows_of(wrong)
    with pytest.raises(DataError, match="the folder nowhere does not exist"):
        rows_of("nowhere/a.parquet")
    with pytest.raises(DataError, match=r"nothing in .* has a similar name"):
        rows_of("wholly-different")


def test_a_folder_that_is_no_data_set_lists_its_files(tmp_path: Path):
    WRITERS["a.jsonl"](tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"not written by datasets' save_to_disk; name one of its files: a\.jsonl"):
        rows_of(tmp_path)


def test_a_saved_folder_of_splits_asks_for_one(tmp_path: Path):
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, such as .*saved/train"):
        rows_of(tmp_path / "saved")
    assert [row for _, row in rows_of(tmp_path / "saved" / "test")] == ROWS


def test_hub_names_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert all(map(is_hub_name, ("owner/name", "owner/name:config:train", "owner/name::train[:10%]", "a-b/c.d_e")))
    paths = ("name", "folder/name", "owner/name.csv", "./owner/name", "/owner/name", "~/name", "a/b/c", "../name")
    assert not any(map(is_hub_name, paths))


def test_a_hub_name_goes_to_load_dataset(monkeypatch: pytest.MonkeyPatch):
    split = datasets.Dataset.from_list(ROWS)
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str | None) -> Any:
        asked.append((name, config, split))
        return held if split is None else held[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    held = datasets.DatasetDict({"train": split})
    assert [row for _, row in rows_of("owner/name")] == ROWS
    held = datasets.DatasetDict({"train": split, "test": split})
    assert rows_of("owner/name:config:test")[0] == (1, ROWS[0])
    with pytest.raises(DataError, match="has the splits train, test; name one, such as owner/name::train"):
        rows_of("owner/name")
    assert asked == [("owner/name", None, None), ("owner/name", "config", "test"), ("owner/name", None, None)]


def test_a_data_set_by_a_script_is_read_as_the_parquet_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(name: str, *config: str | None, split: str | None, data_files: str = "") -> Any:
        if name != "parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        assert data_files == "hf://datasets/owner/name@refs/convert/parquet/harmless/test/*.parquet"
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("rm_optimizer.records.hub.hub_obstacle", lambda *asked: None)
    assert [row for _, row in rows_of("owner/name:harmless:test")] == ROWS


def test_a_hub_name_that_cannot_be_had_is_one_sentence():
    with pytest.raises(DataError, match="no-such-owner/no-such-name: neither a file here nor a data set the hub gives"):
        rows_of("no-such-owner/no-such-name")


def test_names_and_units_of_sources():
    assert [source_name(name) for name in ("x/a.b.csv", "saved", "o/n:c:s", "a.json.gz")] == [
        "a.b",
        "saved",
        "o/n",
        "a",
    ]
    assert [row_unit(name) for name in ("a.csv", "a.jsonl.gz", "a.json", "a.parquet")] == ["line", "line", "row", "row"]


SURROGATE = '{"prompt": "Hi %s", "chosen": "a%s", "rejected": "b%s", "responses": ["c%s"]}'


@pytest.mark.parametrize("place", range(3))
def test_half_a_surrogate_pair_is_a_bad_row_with_its_line(place: int, tmp_path: Path):
    broken = SURROGATE % tuple("\\ud800" if i == place else "" for i in range(4))
    whole = SURROGATE % ("", "", "", "")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([whole] * 9 + [broken]).replace(', "responses": ["c"]', ""))
    with pytest.raises(DataError, match=r"line 10: \w+ holds half of a UTF-16 surrogate pair"):
        PreferenceDataset(path)
    assert [row.row for row in PreferenceDataset(path, on_bad_row="drop").skipped] == [10]


@pytest.mark.parametrize("place", [0, 3])
def test_half_a_surrogate_pair_in_a_file_of_responses_names_its_line(place: int, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(SURROGATE % tuple("\\ud800" if i == place else "" for i in range(4)))
    with pytest.raises(DataError, match=r"line 1: \w+ holds half of a UTF-16 surrogate pair"):
        list(read_responses(path))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("1" * 5_000, "too many digits"),
        ('[{"a": 1, "b": 2, "a": 1}]', "expected each key of an object once, got 'a' 2 times"),
    ],
)
def test_values_that_python_cannot_read_are_a_bad_row_with_its_line(value: str, reason: str, tmp_path: Path):
    row = '{"prompt": "Hi", "chosen": "a", "rejected": "b", "more": %s}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([row % 1] * 9 + [row % value]))
    with pytest.raises(DataError, match=rf"line 10: .*{reason}"):
        PreferenceDataset(path)
    assert len(PreferenceDataset(path, on_bad_row="drop")) == 9
    (tmp_path / "a.json").write_text(f"[{row % value}]")
    with pytest.raises(DataError, match=rf"a\.json: the file cannot be read: .*{reason}"):
        PreferenceDataset(tmp_path / "a.json")


def test_values_nested_below_the_limit_of_the_reader_are_read_or_told(tmp_path: Path):
    row = '{"prompt": "Hi", "chosen": "a", "rejected": "b", "more": %s}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([row % 1] * 9 + [row % ("[" * 900 + "]" * 900)]))
    data = PreferenceDataset(path, on_bad_row="drop")
    assert len(data) + len(data.skipped) == 10


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    table = pa.table([["Hi"], ["a"], ["b"], ["c"]], names=["prompt", "chosen", "rejected", "chosen"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: there are two columns 'chosen'"):
        PreferenceDataset(tmp_path / "a.parquet")


def test_an_object_that_holds_the_rows_as_data_is_read(tmp_path: Path):
    rows = [{"prompt": "Hi", "chosen": "a", "rejected": "b"}]
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": rows}))
    assert len(PreferenceDataset(tmp_path / "a.json")) == 1


def test_a_folder_and_a_pattern_are_the_same_pairs_for_training_and_for_commands(tmp_path: Path):
    for name in ("a.jsonl", "below/b.jsonl", ".hidden/c.jsonl", "_d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        WRITERS["a.jsonl"](tmp_path / name, ROWS)
    for source in (str(tmp_path), str(tmp_path / "**/*.jsonl")):
        config = DataConfig(train=source, val=source, allow_prompt_overlap=True)
        trained, checked = load_training_data(config).train, PairOptions().load(source)
        assert trained.pairs == checked.pairs
        assert trained.notes == checked.notes == ()
    assert {pair.metadata["source"] for pair in PreferenceDataset(str(tmp_path))} == {tmp_path.name}


def test_what_a_folder_leaves_out_is_said(tmp_path: Path):
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        {"a.parquet": WRITERS["a.parquet"], "a.jsonl": write_lines, "a.csv": write_csv}[name](tmp_path / name, ROWS)
    (tmp_path / "infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("x")
    data = PreferenceDataset(str(tmp_path))
    others = ", ".join(str(tmp_path / name) for name in ("a.csv", "a.jsonl", "infos.json"))
    assert data.notes == (f"{tmp_path}: 1 files are read, 3 are left out: {others}",)
    assert len(data) == len(ROWS)


def test_a_folder_reads_files_of_all_kinds_and_a_table_in_two_forms_once(tmp_path: Path):
    for name in ("a.jsonl", "below/a.jsonl", "b.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, ROWS)
    for name in ("a", "c"):
        (tmp_path / f"{name}.tsv").write_text("prompt\tchosen\trejected\nHi\ta\tb\n")
    data = PreferenceDataset(str(tmp_path))
    assert len(data) == 3 * len(ROWS) + 1
    assert data.notes == (f"{tmp_path}: 4 files are read, 1 are left out: {tmp_path / 'a.tsv'}",)
    (tmp_path / "d.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(DataError, match=r"d\.csv: name yours as"):
        PreferenceDataset(str(tmp_path))


@pytest.mark.parametrize("options", [{"train": "{}"}, {"train": "a.jsonl", "val": "{}"}])
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("empty", "the folder holds no Parquet, JSON Lines, JSON or CSV file"),
        ("*.parquet", "no file matches this pattern"),
        ("model", "expected pairs, got the folder of a model or run; name a file of pairs"),
        ("run", "expected pairs, got the folder of a model or run"),
    ],
)
def test_what_a_command_refuses_training_refuses(
    source: str, says: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("empty/x.md", "model/config.json", "run/run.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    WRITERS["a.jsonl"](tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=says):
        PairOptions().load(source)
    with pytest.raises(DataError, match=says):
        load_training_data(DataConfig(**{key: value.format(source) for key, value in options.items()}))


@pytest.mark.parametrize(
    ("name", "says"),
    [("a.pkl", "to_parquet"), ("a.xlsx", "save it as CSV"), ("a.jsonl.bz2", "unpack")],
)
def test_another_kind_of_file_is_told_what_to_do(name: str, says: str, tmp_path: Path):
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=f"unknown kind of file .*{says}"):
        rows_of(tmp_path / name)


def test_an_encoding_that_is_named_is_read_and_utf_16_is_known_by_its_mark(tmp_path: Path):
    table = "prompt,chosen,rejected\nä,ö\u2028,ü\n"
    for encoding in ("utf-16", "utf-8"):
        (tmp_path / "a.csv").write_bytes(table.encode(encoding))
        assert rows_of(tmp_path / "a.csv") == [(2, {"prompt": "ä", "chosen": "ö\u2028", "rejected": "ü"})]
    (tmp_path / "a.csv").write_bytes(table.replace("\u2028", "").encode("latin1"))
    with pytest.raises(DataError, match=r"not UTF-8 text .*; name its encoding .*iconv"):
        rows_of(tmp_path / "a.csv")
    (pair,) = PreferenceDataset(tmp_path / "a.csv", layout={"encoding": "latin1"})
    assert (pair.prompt, pair.chosen, pair.rejected) == ("ä", "ö", "ü")
    with pytest.raises(ConfigError, match=r"encoding must be one that Python knows, .*latin11"):
        PreferenceDataset(tmp_path / "a.csv", layout={"encoding": "latin11"})


def test_a_command_takes_options_of_one_file_in_braces(tmp_path: Path):
    rows = "q,chosen,rejected\nä,ö,ü\n"
    (tmp_path / "a.csv").write_bytes(rows.encode("latin1"))
    write_lines(tmp_path / "b.jsonl", ROWS)
    one = f"{{path: {tmp_path}/a.csv, columns: {{prompt: q}}, layout: {{encoding: latin1}}}}"
    both = PairOptions().load([one, str(tmp_path / "b.jsonl")])
    assert [pair.prompt for pair in both] == ["ä", "Hi", "Bye"]
    assert [*PairOptions().load_splits([one], "PATHS")] == ["a.csv"]
    whole = PairOptions(layout="{encoding: latin1}", columns=["prompt=q"])
    assert whole.load(str(tmp_path / "a.csv"))[0].chosen == "ö"
    for wrong in ("{path: [", "{pat: a.csv}"):
        with pytest.raises(ConfigError, match=r"\{path: a\.csv, weight: 2\}, got '\{pat"):
            PairOptions().load(wrong)


def test_a_json_object_of_lists_of_cells_is_a_table_by_column(tmp_path: Path):
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    (tmp_path / "a.json").write_text(json.dumps(columns))
    assert [row for _, row in rows_of(tmp_path / "a.json")] == ROWS
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "a.json").write_text(json.dumps({"chosen": turns, "rejected": turns}))
    assert rows_of(tmp_path / "a.json") == [(1, {"chosen": turns, "rejected": turns})]


def test_tabs_ndjson_and_zstd_are_read(tmp_path: Path):
    row = {"prompt": "a, b", "chosen": "c", "rejected": "d"}
    (tmp_path / "a.tsv").write_text("prompt\tchosen\trejected\na, b\tc\td\n")
    (tmp_path / "a.ndjson").write_text(json.dumps(row) + "\n")
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(json.dumps(row).encode() + b"\n")
    for name, number in (("a.tsv", 2), ("a.ndjson", 1), ("a.jsonl.zst", 1)):
        assert rows_of(tmp_path / name) == [(number, row)]
    with pytest.raises(DataError, match="fields must be separated by tabs"):
        rows_of(written_as(tmp_path / "b.tsv", "prompt,chosen,rejected\na,b,c\n"))


def written_as(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
