"""Values marked converged are those of their rank, on close neighbors, copies, warm starts and models' Hessians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, End, lanczos, rounding
from rm_optimizer.landscape.solvers.overlooked import with_overlooked
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.landscape.worlds import FOUR_PROMPTS, INNER, dense, reward_model

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


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_converged_values_of_dense_hessians_are_those_of_their_rank(family: str):
    operator = MatrixOperator(dense(family).hessian)
    for top_k, which in ((1, "largest"), (5, "magnitude"), (5, "both"), (12, "both")):
        truth = extreme(operator.matrix, top_k, which)
        for seed in SEEDS:
            found = lanczos(operator, top_k, which=which, seed=seed)
            assert all(found.converged)
            found = with_overlooked(operator, found, which, tolerance=1e-3, seed=seed + 1000)
            assert num_wrong(found, truth) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", ["positive", "mixed", "negative"])
@pytest.mark.parametrize(("rank", "top_k"), [(1, 2), (12, 6), (12, 20), (40, 20), (64, 20)])
def test_zeros_of_a_low_rank_at_the_wanted_end_are_found(rank: int, top_k: int, sign: str, dtype: torch.dtype):
    size, generator = 200, torch.Generator().manual_seed(rank)
    values = torch.rand(rank, generator=generator, dtype=torch.float64).exp() ** 3
    values[: {"positive": 0, "mixed": rank // 4, "negative": rank}[sign]] *= -1
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0][:, :rank]
    matrix = (basis * values) @ basis.T
    for which in ("both", "smallest", "largest", "magnitude"):
        found = lanczos(MatrixOperator(matrix.to(dtype)), top_k, which=which)
        assert found.num_products <= rank + 2 * top_k + 5
        found = with_overlooked(MatrixOperator(matrix.to(dtype)), found, which, tolerance=1e-3, seed=1)
        truth = extreme(matrix, top_k, which)
        atol = rounding(dtype, values.numpy())
        torch.testing.assert_close(found.values, truth, rtol=1e-3, atol=atol)
        is_zero = found.values.abs() <= atol
        assert found.num_overlooked or (~is_zero).tolist() == list(found.converged)
        assert not any(found.converged[i] for i in is_zero.nonzero())


def test_values_that_more_zeros_may_displace_are_not_converged():
    basis = torch.linalg.qr(torch.randn(200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    operator = MatrixOperator((basis[:, :12] * torch.arange(1.0, 13.0)) @ basis[:, :12].T)
    found = lanczos(operator, 6, which="both", max_products=13)
    assert found.converged == (True,) * 6 + (False,) * 6


def test_search_restarts_outside_the_found_vectors():
    basis = torch.linalg.qr(torch.randn(200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    operator = MatrixOperator((basis[:, :12] * torch.arange(1.0, 13.0)) @ basis[:, :12].T)
    wrong = torch.arange(12.0, 0.0, -1.0, dtype=torch.float64)
    residuals, vectors = torch.zeros(12, dtype=torch.float64), basis[:, :12].T.flip(0)
    listed = Eigenpairs(wrong, vectors, residuals, residuals, (True,) * 12, 13, 0.0)
    found = with_overlooked(operator, listed, "both", tolerance=1e-3, seed=1)
    torch.testing.assert_close(found.values, torch.cat([wrong[:6], torch.zeros(6).double()]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("top_k", [1, 5])
def test_values_of_a_narrow_cluster_are_those_of_their_rank(top_k: int):
    cluster = [5.045 - 0.005 * i for i in range(10)]
    operator = of_values(cluster)
    truth = extreme(operator.matrix, top_k, "largest")
    everything = torch.linalg.eigvalsh(operator.matrix)
    for seed in SEEDS:
        alone = lanczos(operator, top_k, seed=seed)
        nearest = (alone.values[:, None] - everything).abs().min(dim=1).values
        assert (nearest <= alone.error_bounds).all()
        found = with_overlooked(operator, alone, "largest", tolerance=1e-3, seed=seed + 1)
        assert num_wrong(found, truth, 2e-3) == 0


def test_a_plain_spectrum_looks_for_copies():
    analyzer = HessianAnalyzer(reward_model("llama"), params=INNER)
    alone = analyzer.compute_spectrum(FOUR_PROMPTS, top_k=2)
    assert alone.num_overlooked == 0
    probed = analyzer.compute_spectrum(FOUR_PROMPTS, top_k=2, options=SpectrumOptions(num_probes=2))
    assert probed.num_overlooked == 0
    assert probed.eigenvalues == alone.eigenvalues


def test_smallest_eigenvalues_over_the_head_are_zeros():
    for dtype in (torch.float32, torch.float64):
        analyzer = HessianAnalyzer(reward_model("llama"), params="head", dtype=dtype)
        truth = analyzer.compute_spectrum(FOUR_PROMPTS[:2], "full")
        found = analyzer.compute_spectrum(FOUR_PROMPTS[:2], top_k=4)
        assert found.eigenvalues == pytest.approx(truth.eigenvalues, rel=1e-3, abs=1e-5 * truth.eigenvalues[0])
        assert sum(found.converged) == 2
