"""The study of ensembles runs at a small size, and its measure of separation is what it is called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ensemble_selection.py"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import ensemble_selection  # type: ignore[import-not-found]

    return ensemble_selection


def test_it_prints_gains_and_paired_differences(study: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["--worlds", "2", "--pairs", "60", "--prompts", "4", "--samples", "16"])
    lines = capsys.readouterr().out.splitlines()[1:]
    found = {name: float(value.split()[0]) for name, value in (line.split(": ") for line in lines)}
    assert found["gold_best"] >= max(found[f"gold_{name}"] for name in ("single", "mean", "min", "uwo"))
    assert found["uwo_less_single"] == pytest.approx(found["gold_uwo"] - found["gold_single"], abs=2e-3)
    assert 0 <= found["auroc_mahalanobis"] <= 1


def test_separation_is_the_probability_of_the_right_order(study: ModuleType) -> None:
    assert study.auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 0.875
