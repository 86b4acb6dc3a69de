"""The landscape benchmark's parts run at a small size, and its errors and ratios are what they are called."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rm_optimizer.landscape.solvers.overlooked import CHECK_PRODUCTS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "landscape.py"
TINY = ("--hidden", "8", "--layers", "1", "--num-pairs", "8", "--max-length", "32", "--steps", "2", "--rounds", "1")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import landscape  # type: ignore[import-not-found]

        return landscape


def test_an_error_is_that_of_the_worst_value_in_descending_order(benchmark: ModuleType):
    assert benchmark.error([-2.0, 1.0, 3.0], [3.0, 1.25, -2.0]) == pytest.approx(0.2)


@pytest.mark.slow
def test_parts_print_what_they_measure(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("pyhessian")
    parts = ("--parts", "oracle", "warm", "spectrum", "gradients", "gauss_newton", "cross_fit", "growth")
    benchmark.main([*TINY, "--top-k", "2", "--models", "encoder", "--give-up", "3", *parts])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith((" ", "encoder:"))]
    found = {name: float(value) for name, value in (line.split(": ") for line in lines)}
    assert found["error_top10"] < 1e-3
    assert found["error_top10_encoder"] == found["error_top10"]
    assert found["gauss_newton_eigenvalues_encoder"] == 8
    assert found["speedup_at_equal_accuracy_top10"] > 0
    assert found["hvps_top10_pyhessian_encoder"] > found["hvps_top5_pyhessian_encoder"]
    without_search = found["warm_start_hvps_top1_after_1_encoder"] - CHECK_PRODUCTS
    assert without_search <= found["cold_start_hvps_top1_after_1_encoder"]
    assert found["products_k_1_encoder"] < found["products_k_4_encoder"]
    assert found["hvp_gradients"] > 0
    assert found["cross_fit_ratio_encoder"] > 0
    assert 0 <= found["products_over_oracle_top2_encoder"] < found["products_top2_encoder"]
    assert all(math.isfinite(value) for value in found.values())


def test_pyhessian_stops_when_its_time_is_over(benchmark: ModuleType):
    pytest.importorskip("pyhessian")
    subject = benchmark.prepare(benchmark.options(list(TINY)), "decoder")
    with pytest.raises(benchmark.GaveUpError):
        benchmark.pyhessian(subject, 2, tol=0, max_iter=10**6, limit=0.1)
    peer = benchmark.pyhessian(subject, 2, tol=0, max_iter=3)
    assert peer.products == [3, 6]
    assert 0 < peer.seconds[0] < peer.seconds[1]


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process(benchmark: ModuleType, tmp_path: Path):
    torch.save(benchmark.prepare(benchmark.options(list(TINY)), "decoder"), tmp_path / "subject.pt")
    command = [sys.executable, str(SCRIPT), "--top-k", "2", "--only", "", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert min(json.loads(text.splitlines()[-1])) > 0


def test_too_few_pairs_are_told(benchmark: ModuleType):
    with pytest.raises(SystemExit, match="0 pairs fit in --max-length 3, expected at least 8"):
        benchmark.prepare(benchmark.options([*TINY, "--max-length", "3"]), "encoder")
