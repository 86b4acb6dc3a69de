"""Pairs whose loss is flat at the weights have a Gauss-Newton matrix of 0, whether all of them are or some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.layers import curvature_of_blocks
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.landscape.worlds import pairs, reward_model

SATURATED = 1e20


def saturated(scale: float) -> BradleyTerryRM:
    model = reward_model("llama").double()
    with torch.no_grad():
        model.reward_head.weight *= scale
    return model


@pytest.mark.parametrize("method", ["gauss_newton_exact", "lanczos", "full"])
@pytest.mark.parametrize("num_sampled", [0, 2])
def test_a_matrix_without_rows_has_eigenvalues_of_zero(method: str, num_sampled: int):
    options = SpectrumOptions(num_sampled=num_sampled, product="reverse")
    analyzer = HessianAnalyzer(saturated(SATURATED), params="head", dtype=torch.float64)
    found = analyzer.compute_spectrum(pairs(16), method, top_k=2, matrix="gauss_newton", options=options)
    assert found.eigenvalues
    assert set(found.eigenvalues) == {0.0}
    assert set(found.error_bounds) == {0.0}
    if found.trace is not None:
        assert (found.trace.value, found.trace.low, found.trace.high) == (0, 0, 0)


@pytest.mark.parametrize("scale", [10.0, 100.0, 300.0, 1e3, 1e4, SATURATED])
def test_layers_of_a_model_with_saturated_pairs(scale: float, tmp_path: Path):
    model = saturated(scale)
    sample = draw_pairs(model, pairs(16), 16, 0, token_budget=4096)
    options = SpectrumOptions(num_probes=2, product="reverse")
    blocks = curvature_of_blocks(MeasuredLoss(model, sample, LossConfig(), dtype=torch.float64), options)
    assert all(block.gauss_newton and block.gauss_newton[0] >= 0 for block in blocks)
    assert all(block.gauss_newton_trace.value == pytest.approx(sum(block.gauss_newton)) for block in blocks)


@pytest.mark.parametrize("beta", [30.0, 100.0, 300.0, 1000.0, 3000.0])
@pytest.mark.parametrize("matrix", ["gauss_newton", "fisher"])
def test_some_saturated_pairs_leave_the_spectrum_of_the_others(beta: float, matrix: str):
    analyzer = HessianAnalyzer(reward_model("llama"), params="head", loss=LossConfig(beta=beta), dtype=torch.float64)
    dense = analyzer.compute_spectrum(pairs(8), "full", matrix=matrix)
    options = SpectrumOptions(num_sampled=2)
    found = analyzer.compute_spectrum(pairs(8), "gauss_newton_exact", top_k=2, matrix=matrix, options=options)
    count = len(found.eigenvalues)
    assert found.eigenvalues == pytest.approx(dense.eigenvalues[:count], rel=1e-6, abs=1e-9 * dense.eigenvalues[0])
