"""The benchmark of choosing pairs runs at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "selection.py"


@pytest.mark.parametrize("rule", ["boundary_optimal", "coreset"])
def test_it_measures_seconds_and_memory_of_a_mapped_pool(monkeypatch: pytest.MonkeyPatch, rule: str):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import selection  # type: ignore[import-not-found]

    seconds, gib = selection.measure(size=selection.BLOCK + 500, hidden=4, k=3, rule=rule)
    assert seconds > 0
    assert 0.01 < gib < 100
