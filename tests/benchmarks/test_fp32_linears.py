"""Every route computes the layer that it is timed for, and ratios are taken within a round."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = {"default": 1e-6, "onednn": 1e-6, "internal_bf16": 1e-2, "bf16": 1e-2}
"""Rounding of sums of 24 products: 24 bits in float32, 8 in bf16."""


@pytest.fixture(scope="module")
def linears() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import fp32_linears  # type: ignore[import-not-found]

        return fp32_linears


@pytest.mark.parametrize("name", TOLERANCE)
def test_a_route_gives_output_and_gradients(name: str, linears: ModuleType):
    x, gradient = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    exact = (x.double() @ weight.double().T, gradient.double() @ weight.double(), gradient.double().T @ x.double())
    assert linears.relative_error(linears.ROUTES[name](x, weight, gradient), exact) < TOLERANCE[name]
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_ratio_is_the_median_over_rounds(linears: ModuleType):
    taken = {"base": [2.0, 9.0, 4.0], "own": [1.0, 3.0, 4.0]}
    assert linears.speedup(taken, "own", "base") == 2.0


def test_every_run_is_timed_once_a_round_after_one_for_free(linears: ModuleType):
    calls: list[str] = []
    taken = linears.rounds_of({name: (lambda n=name: calls.append(n)) for name in "ab"}, 3)
    assert {name: len(values) for name, values in taken.items()} == {"a": 3, "b": 3}
    assert [len(set(calls[turn : turn + 2])) for turn in range(0, 8, 2)] == [2, 2, 2, 2]
