"""The lists of `tools/mutate.py` fit the package: a planted change applies once, a judged survivor still exists."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize(("name", "least"), [("planted.tsv", 10), ("device_faults.tsv", 15)])
def test_each_planted_change_applies_once(name, least):
    planted = table(name)
    assert len({row["kind"] for row in planted}) >= least
    assert {row["before"]: (ROOT / row["file"]).read_text().count(row["before"]) for row in planted} == {
        row["before"]: 1 for row in planted
    }


def test_survivors_have_a_verdict_and_a_reason():
    for row in table("survivors.tsv"):
        assert row["verdict"] in ("equal", "cosmetic", "missed")
        assert row["reason"]
        assert (ROOT / row["file"]).is_file(), row["file"]
