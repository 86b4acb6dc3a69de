"""The best-of-n benchmark runs at a small size, and its two ways of scoring agree."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "best_of_n.py"
SMALL = ("--num-prompts", "2", "--samples", "6", "--hidden", "16", "--layers", "1", "--rounds", "1", "--no-server")


def test_it_prints_speed_agreement_and_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import best_of_n  # type: ignore[import-not-found]

    best_of_n.main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    found = {name: float(value) for name, value in (line.split(": ") for line in lines[1:])}
    assert found["speedup_scoring"] > 0
    assert found["max_score_difference"] < 1e-5
    assert found["curve_error"] < 1e-10
    assert found["curve_seconds_16384"] < 5
