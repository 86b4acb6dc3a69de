"""The benchmark of the data path prints what it measures, at a small size."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_path.py"


def lines(python: Path, *arguments: str) -> dict[str, float]:
    command = [python, "-W", "error", str(SCRIPT), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found = (line.split(": ") for line in text.splitlines() if ": " in line)
    return {name: float(value) for name, value in found}


@pytest.mark.slow
def test_it_measures_memory_and_growth(python: Path, tmp_path: Path):
    found = lines(python, "--sizes", "1000", "3000", "--ray-bytes", "0", "--folder", str(tmp_path))
    assert found["seconds_per_100k_pairs_at_1k"] > found["seconds_per_100k_pairs_read_at_1k"] > 0
    assert found["rss_bytes_per_100k_pairs_at_3k"] > 0
    assert found["growth_exponent"] < 1.5
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_streams_every_pair_of_the_file(python: Path, tmp_path: Path):
    found = lines(python, "--sizes", "--ray-bytes", "1000000", "--workers", "1", "--folder", str(tmp_path))
    assert found["ray_text_bytes"] >= 1_000_000
    assert found["ray_pairs"] == 10_000
    assert 0 < found["ray_driver_peak_rss_bytes"] < found["ray_peak_rss_bytes"]
    assert not list(tmp_path.iterdir())
