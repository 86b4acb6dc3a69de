"""Values marked converged are those of their rank, on close neighbors, copies, warm starts and models' Hessians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solve import SpectrumOptions
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, End, lanczos
from rm_optimizer.landscape.solvers.overlooked import with_overlooked
from tests.landscape.worlds import FAMILIES, FOUR_PROMPTS, INNER, dense, reward_model

CLOUD = 0.1 * (2 * torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1)
"""Small eigenvalues, beside which others stand alone."""
SEEDS = range(8)


def of_values(first: list[float]) -> MatrixOperator:
    values = torch.cat([torch.tensor(first, dtype=torch.float64), CLOUD])[:300]
    basis = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    return MatrixOperator((basis * values) @ basis.T)


def extreme(matrix: Tensor, top_k: int, which: End) -> Tensor:
    values = torch.linalg.eigvalsh(matrix).flip(0)
    if which == "magnitude":
        values = values[values.abs().argsort(descending=True)]
        return values[:top_k].sort(descending=True).values
    top, bottom = values[:top_k], values[-top_k:]
    return {"largest": top, "smallest": bottom, "both": torch.cat([top, bottom])}[which]


def num_wrong(found: Eigenpairs, truth: Tensor, tolerance: float = 1e-3) -> int:
    is_off = (found.values - truth).abs() > tolerance * truth.abs()
    return int((is_off & torch.tensor(found.converged)).sum())


def test_a_value_between_two_close_eigenvalues_is_not_called_converged():
    operator = of_values([1.6227, 1.5945, 0.293, 0.2287, -1.2546])
    for seed in SEEDS:
        found = lanczos(operator, 1, seed=seed)
        assert all(found.converged)
        assert float(found.values[0]) == pytest.approx(1.6227, rel=1e-3)
        early = lanczos(operator, 1, seed=seed, max_products=4)
        assert abs(float(early.values[0]) - 1.6) < float(early.error_bounds[0]) + 0.03
        assert not any(early.converged)


@pytest.mark.parametrize(
    ("values", "top_k", "which"),
    [
        ([10.0, 10.0, 8.0, 6.0, -3.0], 3, "largest"),
        ([10.0, 10.0, 10.0, 8.0, 6.0, 5.0, -3.0], 4, "largest"),
        ([10.0, 9.99999, 8.0, 6.0, -3.0], 3, "largest"),
        ([10.0, 8.0, 6.0, -9.0, -9.0, -7.0], 2, "both"),
        ([-10.0, -10.0, -8.0, -6.0, 3.0], 3, "smallest"),
        ([-10.0, -8.0, -6.0, -6.0, -5.0, 3.0], 4, "smallest"),
        ([10.0, 8.0, 6.0, -9.0, -9.0], 3, "magnitude"),
    ],
)
def test_copies_and_close_pairs_are_found_beside_the_iteration(values: list[float], top_k: int, which: End):
    operator = of_values(values)
    truth = extreme(operator.matrix, top_k, which)
    num_found = 0
    for seed in SEEDS:
        alone = lanczos(operator, top_k, which=which, seed=seed)
        found = with_overlooked(operator, alone, which, tolerance=1e-3, seed=seed + 1)
        num_found += found.num_overlooked or 0
        torch.testing.assert_close(found.values, truth, rtol=1e-3, atol=0)
        assert ((found.values - truth).abs() <= found.error_bounds).all()
        residuals = (found.vectors @ operator.matrix - found.values[:, None] * found.vectors).norm(dim=1)
        assert (residuals <= found.residuals * (1 + 1e-6)).all()
    assert num_found >= len(SEEDS) / 2


def test_a_copy_near_the_edge_of_a_wide_bulk_is_found():
    values = torch.cat([torch.tensor([3.0, 1.05, 1.05], dtype=torch.float64), 10 * CLOUD[:297]])
    basis = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    operator = MatrixOperator((basis * values) @ basis.T)
    for seed in SEEDS:
        alone = lanczos(operator, 3, seed=seed)
        found = with_overlooked(operator, alone, "largest", tolerance=1e-3, seed=seed + 100)
        assert num_wrong(found, torch.tensor([3.0, 1.05, 1.05], dtype=torch.float64)) == 0


def test_nothing_is_added_where_nothing_was_overlooked():
    operator = of_values([10.0, 8.0, 6.0, -3.0, -9.0])
    found = lanczos(operator, 2, which="both")
    checked = with_overlooked(operator, found, "both", tolerance=1e-3, seed=1)
    assert checked.num_overlooked == 0
    assert torch.equal(checked.vectors, found.vectors)
    assert checked.num_products <= found.num_products + max(8, found.num_products // 4)


def test_zeros_that_only_rounding_tells_apart_are_no_copies():
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    operator = MatrixOperator((basis[:, :2] * torch.tensor([0.15, 0.07])) @ basis[:, :2].T)
    for seed in SEEDS:
        found = lanczos(operator, 3, which="both", seed=seed)
        assert with_overlooked(operator, found, "both", tolerance=1e-3, seed=seed + 1).num_overlooked == 0


def test_a_warm_start_sees_a_new_top_eigenvalue_at_right_angles_to_the_old():
    for seed in SEEDS:
        moved = torch.diag(
            torch.cat([torch.tensor([20.0, 10.0, 6.0, 5.0, -4.0], dtype=torch.float64), 5 * CLOUD[:295]])
        )
        old = torch.zeros(1, 300, dtype=torch.float64)
        old[0, 1] = 1
        old[0, 2:] += 5e-4 * torch.randn(298, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = lanczos(MatrixOperator(moved), 1, start=old, seed=seed)
        assert float(found.values[0]) == pytest.approx(20, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_converged_values_of_dense_hessians_are_those_of_their_rank(family: str):
    operator = MatrixOperator(dense(family).hessian)
    for top_k, which in ((1, "largest"), (5, "magnitude"), (5, "both"), (12, "both")):
        truth = extreme(operator.matrix, top_k, which)
        for seed in SEEDS:
            found = lanczos(operator, top_k, which=which, seed=seed)
            assert all(found.converged)
            found = with_overlooked(operator, found, which, tolerance=1e-3, seed=seed + 1000)
            assert num_wrong(found, truth) == 0


def test_a_spectrum_tells_whether_copies_were_looked_for():
    analyzer = HessianAnalyzer(reward_model("llama"), params=INNER)
    alone = analyzer.compute_spectrum(FOUR_PROMPTS, top_k=2)
    assert alone.num_overlooked is None
    probed = analyzer.compute_spectrum(FOUR_PROMPTS, top_k=2, options=SpectrumOptions(trace_products=2))
    assert probed.num_overlooked == 0
    assert probed.eigenvalues == alone.eigenvalues
