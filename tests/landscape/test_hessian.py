"""The front door gives the spectrum of the dense matrix by every method, and says what it rests on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.landscape import (
    HessianAnalyzer,
    HessianSpectrum,
    SpectrumComparison,
    SpectrumOptions,
    compare_spectra,
    summarize,
)
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.solvers.overlooked import CHECK_PRODUCTS
from rm_optimizer.landscape.spectrum import SpectrumStatus
from rm_optimizer.records import ledger
from tests.landscape.worlds import EVERYTHING, INNER, PLAIN, dense, micro_batches, pairs, reward_model

FIVE = pairs()[:5]
BOTH = SpectrumOptions(tolerance=1e-6, product="kept_graph")


def analyzer(family: str = "llama", **options) -> HessianAnalyzer:  # type: ignore[no-untyped-def]
    model = dense(family).model
    return HessianAnalyzer(model, **{"loss": EVERYTHING, "params": INNER, "dtype": torch.float64} | options)


def test_lanczos_gives_both_ends_with_trace_and_density():
    truth = torch.linalg.eigvalsh(dense("llama").hessian).flip(0)
    options = SpectrumOptions(tolerance=1e-6, product="kept_graph", num_probes=10, num_sampled=2)
    found = analyzer().compute_spectrum(FIVE, top_k=4, options=options, with_density=True)
    wanted = torch.cat([truth[:4], truth[-4:]])
    torch.testing.assert_close(torch.tensor(found.eigenvalues, dtype=torch.float64), wanted, rtol=1e-5, atol=0)
    assert found.trace is not None
    assert abs(found.trace.value - float(truth.sum())) < 3 * found.trace.standard_error  # type: ignore[operator]
    assert found.density is not None
    assert found.density.exact == found.eigenvalues
    assert [estimate.value for estimate in found.sampling] == pytest.approx(list(found.eigenvalues[:2]), rel=1e-4)
    assert (found.num_pairs, found.num_parameters, found.matrix) == (5, len(truth), "hessian")
    assert found.product == "kept_graph"
    assert found.status == SpectrumStatus.complete


def test_full_and_gram_spectra_are_exhaustive():
    known = dense("llama")
    full = analyzer().compute_spectrum(FIVE, "full", options=SpectrumOptions(product="kept_graph"))
    assert full.is_exhaustive
    assert full.trace is not None
    assert full.trace.value == pytest.approx(float(known.hessian.trace()))
    gram = analyzer().compute_spectrum(FIVE, "gauss_newton_exact", top_k=3, options=SpectrumOptions(num_sampled=2))
    values = torch.linalg.eigvalsh(known.gauss_newton).flip(0)
    assert gram.eigenvalues == pytest.approx(values[:10].tolist(), rel=1e-6)
    assert gram.trace is not None
    assert (gram.trace.value, gram.trace.kind) == (pytest.approx(sum(gram.eigenvalues)), "student")
    assert len(gram.sampling) == 2
    by_lanczos = analyzer().compute_spectrum(
        FIVE, matrix="gauss_newton", top_k=20, options=SpectrumOptions(tolerance=1e-6)
    )
    assert by_lanczos.eigenvalues == pytest.approx(gram.eigenvalues, rel=1e-5)  # ten, the rank of five pairs
    assert (by_lanczos.num_top, by_lanczos.num_bottom) == (10, 0)


@pytest.mark.parametrize("with_everything", [True, False])
@pytest.mark.parametrize("matrix", ["gauss_newton", "fisher"])
def test_float32_rounding_gives_no_pair_a_second_row(matrix, with_everything):  # type: ignore[no-untyped-def]
    known = dense("bert", with_everything)
    door = HessianAnalyzer(known.model, loss=EVERYTHING if with_everything else None, params=INNER)
    found = door.compute_spectrum(FIVE, "gauss_newton_exact", matrix=matrix, top_k=2)
    rows = 10 if with_everything and matrix == "gauss_newton" else 5
    values = torch.linalg.eigvalsh(getattr(known, matrix)).flip(0)[:rows]
    torch.testing.assert_close(torch.tensor(found.eigenvalues), values.float(), rtol=1e-4, atol=1e-6 * float(values[0]))


@pytest.mark.parametrize(("method", "top_k"), [("full", 1), ("lanczos", 9)])
def test_a_density_where_every_eigenvalue_was_found(method, top_k):  # type: ignore[no-untyped-def]
    options = SpectrumOptions(num_probes=3, product="reverse", which="largest")
    head = analyzer("bert", params="head")
    found = head.compute_spectrum(FIVE, method, top_k=top_k, options=options, with_density=True)
    assert len(found.eigenvalues) == found.num_parameters
    assert found.density is not None
    assert found.density.exact == found.eigenvalues
    assert found.trace is not None
    assert found.trace.value == pytest.approx(sum(found.eigenvalues))
    assert summarize(found)["entropy_rank"].value is not None


def test_json_brings_back_the_same_spectrum():
    options = SpectrumOptions(num_probes=2, num_sampled=1, product="reverse")
    found = analyzer("bert").compute_spectrum(FIVE, top_k=2, options=options, with_density=True)
    assert HessianSpectrum.from_json(found.to_json()) == found


def test_a_loader_of_batches_gives_what_pairs_give():
    model = dense("bert").model
    from_pairs = analyzer("bert").compute_spectrum(FIVE, top_k=2, options=BOTH)
    batches = micro_batches(model, 60, data=FIVE)
    from_loader = analyzer("bert").compute_spectrum(batches, top_k=2, options=BOTH)
    assert from_loader.eigenvalues == pytest.approx(from_pairs.eigenvalues, rel=1e-6)


def test_the_draw_of_pairs_is_fixed_by_the_seed():
    model = reward_model("bert")
    spectra = [
        HessianAnalyzer(model, params="head", seed=seed).compute_spectrum(
            pairs(), "full", num_pairs=4, options=SpectrumOptions(product="reverse")
        )
        for seed in (0, 0, 1)
    ]
    assert spectra[0].eigenvalues == spectra[1].eigenvalues
    assert spectra[0].eigenvalues != spectra[2].eigenvalues
    assert spectra[0].num_pairs == 4


def test_an_interrupted_computation_keeps_and_labels_what_it_has_and_continues(tmp_path: Path):
    file = tmp_path / "lanczos.json"

    def stop(progress: Progress) -> None:
        if progress.num_products == 15:
            raise KeyboardInterrupt

    partial = analyzer().compute_spectrum(FIVE, top_k=4, options=BOTH, state_file=file, on_iteration=stop)
    assert partial.status == SpectrumStatus.interrupted
    assert not all(partial.converged)
    assert partial.num_products == 15
    assert file.exists()
    resumed = analyzer().compute_spectrum(FIVE, top_k=4, options=BOTH, state_file=file)
    whole = analyzer().compute_spectrum(FIVE, top_k=4, options=BOTH)
    assert resumed.eigenvalues == whole.eigenvalues
    assert resumed.num_products == whole.num_products
    assert resumed.wall_seconds > partial.wall_seconds / 2
    assert not file.exists()


def test_a_call_shows_its_products_unless_it_is_told_not_to(monkeypatch, capsys):
    monkeypatch.setattr(ledger, "SECONDS_BETWEEN_LINES", 0.0)
    found = analyzer().compute_spectrum(FIVE, top_k=1, options=SpectrumOptions(product="kept_graph", num_probes=2))
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "spectrum: 1 products, 0 s"
    assert shown[-1].startswith(f"spectrum: {found.num_products} products")
    analyzer().compute_spectrum(FIVE, top_k=1, options=BOTH, progress=False)
    analyzer().compute_spectrum(FIVE, top_k=1, options=BOTH, on_product=lambda num_products: None)
    assert not capsys.readouterr().err


def test_a_spectrum_equals_itself_and_overlaps_with_itself():
    first = analyzer("bert").compute_spectrum(FIVE, top_k=3, options=BOTH)
    more = analyzer("bert").compute_spectrum(FIVE, top_k=5, options=BOTH)
    across = compare_spectra(first, more)
    assert across.ratios == pytest.approx((1.0, 1.0, 1.0), rel=1e-3)
    assert across.bottom_ratios == pytest.approx((1.0, 1.0, 1.0), rel=1e-3)
    assert across.subspace_overlap == pytest.approx(1.0, rel=1e-3)
    comparison = compare_spectra(first, first, top_k=3)
    assert comparison.ratios == (1.0, 1.0, 1.0)
    assert comparison.subspace_overlap == pytest.approx(1.0)
    assert SpectrumComparison.from_json(comparison.to_json()) == comparison
    assert first.eigenvectors is not None
    assert compare_spectra(HessianSpectrum.from_json(first.to_json()), first).subspace_overlap is None
    with pytest.raises(ConfigError, match=r"top_k must lie in \[1, 3\]"):
        compare_spectra(first, first, top_k=4)


def test_an_earlier_spectrum_is_a_start_for_the_next():
    options = SpectrumOptions(which="largest", tolerance=1e-4, product="kept_graph")
    first = analyzer().compute_spectrum(FIVE, top_k=1, options=options)
    again = analyzer().compute_spectrum(FIVE, top_k=1, options=options, start=first)
    assert again.num_products - CHECK_PRODUCTS < first.num_products  # a search for what the start kept out follows it
    assert again.num_overlooked == 0
    assert again.eigenvalues == pytest.approx(first.eigenvalues, rel=1e-4)


def test_mistakes_are_told_in_one_sentence():
    door = analyzer("bert")
    with pytest.raises(ConfigError, match="unknown method 'lanczso'; did you mean 'lanczos'"):
        door.compute_spectrum(FIVE, "lanczso")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown matrix 'hesian'; did you mean 'hessian'"):
        door.compute_spectrum(FIVE, matrix="hesian")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown which 'top'"):
        door.compute_spectrum(FIVE, options=SpectrumOptions(which="top"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tolerance must lie in \(0, 1\), got -1"):
        door.compute_spectrum(FIVE, options=SpectrumOptions(tolerance=-1))
    with pytest.raises(ConfigError, match=r"dtype must be torch.float32 or torch.float64, got torch.bfloat16"):
        analyzer("bert", dtype=torch.bfloat16).compute_spectrum(FIVE)
    with pytest.raises(ConfigError, match="use method=lanczos"):
        door.compute_spectrum(FIVE, "gauss_newton_exact", matrix="hessian")
    with pytest.raises(DataError, match="needs at least 2 pairs, got 1"):
        door.compute_spectrum(FIVE[:1])
    with pytest.raises(DataError, match="needs at least 2 pairs, got 0"):
        door.compute_spectrum([])
    with pytest.raises(DataError, match="must give batches of pairs, got str"):
        door.compute_spectrum(iter(["a"]))  # type: ignore[arg-type]
    head = analyzer("bert", params="head")
    with pytest.raises(ConfigError, match=r"top_k at each end must lie in \[1, 4\], got 20"):
        head.compute_spectrum(FIVE, options=SpectrumOptions(product="reverse"))


def test_every_quantity_has_a_value_or_a_reason():
    top = analyzer("bert").compute_spectrum(FIVE, top_k=2, options=BOTH)
    assert isinstance(FIVE[0], PreferencePair)
    for name, quantity in summarize(top).items():
        assert (quantity.value is None) != (quantity.reason is None), name
    assert summarize(top)["entropy_rank"].value is None


def test_spectra_of_another_loss_or_other_pairs_are_not_compared():
    first = analyzer("bert").compute_spectrum(FIVE, top_k=2, options=BOTH)
    for other, what in (
        (analyzer("bert", loss=PLAIN).compute_spectrum(FIVE, top_k=2, options=BOTH), "loss options"),
        (analyzer("bert").compute_spectrum(FIVE[:4], top_k=2, options=BOTH), "pairs"),
    ):
        assert other.weights_digest == first.weights_digest
        for one in (first, HessianSpectrum.from_json(first.to_json())):
            with pytest.raises(ConfigError, match=f"spectra to compare must be of the same {what}, got "):
                compare_spectra(one, other)
