"""A ledger keeps every whole piece of one computation, and no piece of another."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import pytest

from rm_optimizer.errors import DataError
from rm_optimizer.records.ledger import open_ledger


def pieces(path: Path, identity: str, *added: object, num_wanted: int | None = None) -> list[object]:
    """What an opened ledger holds, before more is added."""
    with open_ledger(path, identity, other="another sum", num_wanted=num_wanted) as ledger:
        found = list(ledger.values())
        for piece in added:
            ledger.append(piece)
    return found


@pytest.mark.parametrize("num_wanted", [None, 3])
def test_a_torn_last_line_is_cut_off_and_the_rest_goes_on(tmp_path, num_wanted):
    path = tmp_path / "folder" / "a.jsonl"
    pieces(path, "one", [1], {"two": math.nan}, num_wanted=num_wanted)
    for torn in ('{"th', '{"identity"'):
        with path.open("a") as file:
            file.write(torn)
        assert pieces(path, "one", num_wanted=num_wanted) == [[1], {"two": None}]
    pieces(path, "one", 3, num_wanted=num_wanted)
    assert pieces(path, "one", num_wanted=num_wanted) == [[1], {"two": None}, 3]


@pytest.mark.parametrize("first", ["", '{"identi', '{"identity": "another"}\n'])
def test_a_file_without_a_whole_piece_is_started_anew(tmp_path, first):
    path = tmp_path / "a.jsonl"
    path.write_text(first)
    assert pieces(path, "one", 1) == []
    assert path.read_text() == '{"identity": "one"}\n1\n'


@pytest.mark.parametrize("num_wanted", [None, 2])
def test_part_of_another_computation_is_refused_and_kept(tmp_path, num_wanted):
    path = tmp_path / "a.jsonl"
    pieces(path, "one", 1, num_wanted=num_wanted)
    with pytest.raises(DataError, match=r"a\.jsonl: holds another sum; remove it to start again"):
        pieces(path, "another", num_wanted=num_wanted)
    assert pieces(path, "one", num_wanted=num_wanted) == [1]


def test_a_finished_computation_makes_room_for_the_first_piece_of_another(tmp_path):
    path = tmp_path / "a.jsonl"
    pieces(path, "one", 1, num_wanted=1)
    assert pieces(path, "another", num_wanted=2) == []
    assert pieces(path, "one", num_wanted=1) == [1]
    assert pieces(path, "another", 2, num_wanted=2) == []
    assert pieces(path, "another", num_wanted=2) == [2]


def test_a_file_of_something_else_is_refused_and_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("my notes\nand more\n")
    with pytest.raises(DataError, match="holds another sum"):
        pieces(path, "one", num_wanted=1)
    assert path.read_text() == "my notes\nand more\n"


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl"
    with open_ledger(path, "one", other="another") as ledger:
        ledger.append(1)
        with pytest.raises(DataError, match="another process is writing it"):
            pieces(path, "one")
    with suppress(RuntimeError), open_ledger(path, "one", other="another") as ledger:
        ledger.append(2)
        raise RuntimeError
    assert pieces(path, "one") == [1, 2]
