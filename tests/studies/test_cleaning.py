"""Training without suspected labels: the gain in a known world, and a small study from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cleaning
import numpy as np
import pytest
from cleaning import POOLS, measure_split


def test_filtered_training_is_better_at_a_fifth_of_wrong_labels_and_changes_nothing_without():
    found = [measure_split(POOLS[0], 400, 0.2, 0.05, seed) for seed in range(4)]
    assert np.mean([row["auroc"] for row in found]) > 0.9
    assert 0.005 < np.mean([row["gain"] for row in found]) < np.mean([row["exact_gain"] for row in found])
    clean = measure_split(POOLS[0], 400, 0.0, 0.05, 0)
    assert [clean[name] for name in ("auroc", "suspected", "gain", "fewer_gain", "exact_gain")] == [None, 0, 0, 0, 0]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["cleaning.py", str(folder), *options])
    cleaning.main()


def test_a_cleaning_study_is_read_again_from_its_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--splits", "2", "--pairs", "60", "--flips", "0.3"]
    run(monkeypatch, tmp_path, *options)
    first = capsys.readouterr().out
    assert "2 x 60" in first
    rows = json.loads((tmp_path / "cleaning.json").read_text())
    assert [(row["pool"], row["flips"]) for row in rows] == [("decided", 0.3), ("noisy", 0.3)]
    monkeypatch.setattr(cleaning, "held_out_chances", None)
    run(monkeypatch, tmp_path, *options)
    assert (json.loads((tmp_path / "cleaning.json").read_text()), capsys.readouterr().out) == (rows, first)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--flips", "0.5"], "--flips must lie in [0, 0.5), got 0.5"),
        (["--false-positive-rate", "1"], "--false-positive-rate must lie in (0, 1), got 1"),
        (["--pairs", "4000"], "has 3,000 training pairs, fewer than --pairs 4000; lower it"),
        (["--splits", "1"], "--splits must be at least 2, got 1"),
        (["--name", "x"], "--model and --name are for --data"),
    ],
)
def test_bad_options_of_a_cleaning_study_are_one_sentence_and_leave_nothing(
    tmp_path, monkeypatch, capsys, options, expected
):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path / "s", *options)
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
