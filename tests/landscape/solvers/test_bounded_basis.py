"""A basis of bounded size finds the same eigenvalues by the same stopping rule."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape import computation
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import MatrixOperator
from rm_optimizer.landscape.solvers.krylov import KrylovState, remove_states
from rm_optimizer.landscape.solvers.lanczos import End, Progress, lanczos
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.landscape.solvers.test_overlooked import extreme, num_wrong
from tests.landscape.worlds import INNER, pairs, reward_model

DIMENSION = 300


def decaying(dtype: torch.dtype = torch.float64) -> MatrixOperator:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=generator, dtype=torch.float64))[0]
    values = 10.0 / torch.arange(1, DIMENSION + 1, dtype=torch.float64) * (-1.0) ** torch.arange(DIMENSION)
    return MatrixOperator(((basis * values) @ basis.T).to(dtype))


def test_a_limit_of_memory_bounds_the_basis_and_is_refused_with_its_remedy_where_too_small(caplog):
    analyzer = HessianAnalyzer(reward_model(), params=INNER, dtype=torch.float64)
    free = SpectrumOptions(which="largest", product="reverse", tolerance=1e-4)
    with caplog.at_level("INFO", logger="rm_optimizer"):
        found = analyzer.compute_spectrum(pairs(), top_k=2, options=free)
    before, after = caplog.messages[-2:]
    told = r"2 eigenvalues over \S+ parameters: about 14 products, at most 56, and \S+ GiB for vectors; .* 22 products"
    assert re.fullmatch(told, before)
    assert re.fullmatch(r"a product takes \S+ s, 21 more of them about \S+ min", after)
    vector = 8 * found.num_parameters
    bounded = analyzer.compute_spectrum(pairs(), top_k=2, options=replace(free, memory_gib=8 * vector / 2**30))
    assert bounded.eigenvalues == pytest.approx(found.eigenvalues, rel=1e-6)
    with pytest.raises(ConfigError, match=r"2 eigenvalues over .* need .* GiB .*; raise landscape.memory_gib, or"):
        analyzer.compute_spectrum(pairs(), top_k=2, options=replace(free, memory_gib=(8 * vector - 1) / 2**30))


def test_a_basis_without_a_limit_fits_into_half_of_the_free_memory_or_is_refused_before_a_product(
    monkeypatch: pytest.MonkeyPatch,
):
    analyzer = HessianAnalyzer(reward_model(), params=INNER, dtype=torch.float64)
    options = SpectrumOptions(which="largest", product="reverse", tolerance=1e-4)
    found = analyzer.compute_spectrum(pairs(), top_k=2, options=options)
    vector = 8 * found.num_parameters
    monkeypatch.setattr(computation, "free_bytes", lambda device: 2.0 * 8 * vector)
    bounded = analyzer.compute_spectrum(pairs(), top_k=2, options=options)
    assert bounded.eigenvalues == pytest.approx(found.eigenvalues, rel=1e-6)
    assert bounded.eigenvalues != found.eigenvalues  # of another basis
    monkeypatch.setattr(computation, "free_bytes", lambda device: 2.0 * 8 * vector - 2)
    products: list[Progress] = []
    with pytest.raises(ConfigError, match=r"GiB for vectors, and half of the free memory is .*memory_gib.* or lower"):
        analyzer.compute_spectrum(pairs(), top_k=2, options=options, on_iteration=products.append)
    assert not products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("top_k", "which", "most"), [(1, "largest", 5), (5, "magnitude", 10), (4, "both", 16)])
def test_a_bounded_basis_finds_the_same_values(top_k: int, which: End, most: int, dtype: torch.dtype):
    operator, state = decaying(dtype), KrylovState()
    sizes: list[int] = []
    found = lanczos(
        operator,
        top_k,
        which=which,
        tolerance=1e-4,
        max_basis=most,
        state=state,
        on_iteration=lambda progress: sizes.append(len(state.basis)),
    )
    unbounded = lanczos(operator, top_k, which=which, tolerance=1e-4)
    assert max(sizes) == most < len(sizes)
    assert all(found.converged)
    assert num_wrong(found, extreme(operator.matrix.double(), top_k, which)) == 0
    assert found.num_products <= 1.5 * unbounded.num_products
    images = operator.apply(found.vectors)
    assert ((images - found.values.to(dtype)[:, None] * found.vectors).norm(dim=1) <= found.residuals).all()
    assert found.orthogonality_loss < 1e-6


def test_a_basis_that_was_made_smaller_goes_on_from_its_file(tmp_path: Path):
    operator, file, state = decaying(), tmp_path / "state.json", KrylovState()
    whole = lanczos(operator, 5, max_basis=12)

    def stop(progress: Progress) -> None:
        if progress.num_products % 5 == 0:
            state.save(file)
        if progress.num_products == whole.num_products - 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanczos(operator, 5, max_basis=12, state=state, on_iteration=stop)
    assert len(list(tmp_path.iterdir())) == 2
    kept = KrylovState.load(file)
    assert kept.num_kept
    resumed = lanczos(operator, 5, max_basis=12, state=kept)
    assert torch.equal(resumed.values, whole.values)
    assert resumed.num_products == whole.num_products
    remove_states(file)
    assert not list(tmp_path.iterdir())


def test_an_exhausted_space_ends_within_the_bound():
    matrix = torch.zeros(50, 50, dtype=torch.float64)
    matrix[range(3), range(3)] = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    state = KrylovState()
    found = lanczos(MatrixOperator(matrix), 2, max_basis=6, state=state)
    assert found.values.tolist() == pytest.approx([3.0, 2.0])
    assert len(state.basis) <= 6


def test_a_basis_too_small_for_the_values_is_refused():
    with pytest.raises(
        ConfigError, match="max_basis must be at least 14 for 10 eigenvalues, got 13; raise it or lower"
    ):
        lanczos(decaying(), 5, which="both", max_basis=13)


def test_a_spectrum_without_vectors_has_the_same_values():
    analyzer = HessianAnalyzer(reward_model("bert"), params=INNER)
    few = SpectrumOptions(which="magnitude", product="kept_graph", max_basis=12, keep_vectors=False, num_probes=3)
    found = analyzer.compute_spectrum(pairs()[:5], top_k=4, options=few)
    whole = analyzer.compute_spectrum(pairs()[:5], top_k=4, options=SpectrumOptions(which="magnitude"))
    assert found.eigenvalues == pytest.approx(whole.eigenvalues, rel=1e-3)
    assert found.eigenvectors is not None
    assert len(found.eigenvectors) == 0
    assert found.num_overlooked is None
    assert found.trace is not None
