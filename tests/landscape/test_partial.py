"""What a user stops, or starts from elsewhere, is kept, labeled and gone on from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import HessianOperator
from rm_optimizer.landscape.solvers import krylov
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.solvers.overlooked import CHECK_PRODUCTS
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.landscape.worlds import INNER, dense, micro_batches, pairs

FIVE = pairs()[:5]


def analyzer(**options: object) -> HessianAnalyzer:
    given = {"params": INNER, "dtype": torch.float64} | options
    return HessianAnalyzer(dense("bert").model, **given)  # type: ignore[arg-type]


def stop_at(count: int) -> Callable[[Progress], None]:
    def stop(progress: Progress) -> None:
        if progress.num_products == count:
            raise KeyboardInterrupt

    return stop


def test_a_stopped_iteration_goes_on_from_its_last_product_and_tells_the_time_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    options, file = SpectrumOptions(tolerance=1e-6, product="kept_graph"), tmp_path / "lanczos.json"
    partial = analyzer().compute_spectrum(FIVE, top_k=3, options=options, state_file=file, on_iteration=stop_at(7))
    assert partial.status == SpectrumStatus.interrupted
    again: list[int] = []
    caplog.clear()
    with caplog.at_level("INFO", logger="rm_optimizer"):
        resumed = analyzer().compute_spectrum(
            FIVE, top_k=3, options=options, state_file=file, on_iteration=lambda at: again.append(at.num_products)
        )
    assert re.fullmatch(r"a product takes \S+ s, 23 more of them about \S+ min", caplog.messages[-1])
    assert again[0] == 7
    assert resumed.status == SpectrumStatus.complete
    assert not list(tmp_path.iterdir())


def test_a_killed_cross_fit_goes_on_from_the_search_it_stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = SpectrumOptions(product="reverse", num_sampled=1)
    monkeypatch.setattr(krylov, "SAVE_SECONDS", 0.0)
    apply, calls = HessianOperator.apply, 0

    def counted(operator: HessianOperator, vectors: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == killed_at:
            raise MemoryError
        return apply(operator, vectors)

    monkeypatch.setattr(HessianOperator, "apply", counted)
    killed_at, told = 0, list[int]()
    whole = analyzer().compute_spectrum(FIVE, top_k=1, options=options, on_product=told.append)
    assert whole.cross_fit is not None
    assert told == list(range(told[0], whole.num_products + whole.cross_fit.num_products + 1))
    left = 2
    calls, killed_at = 0, calls - left + 1
    with pytest.raises(MemoryError):
        analyzer().compute_spectrum(FIVE, top_k=1, options=options, state_file=tmp_path / "lanczos.json")
    calls = 0
    resumed = analyzer().compute_spectrum(FIVE, top_k=1, options=options, state_file=tmp_path / "lanczos.json")
    assert calls == left + CHECK_PRODUCTS  # the search for overlooked values has no state
    assert whole.cross_fit == resumed.cross_fit
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("num_probes", "with_density"), [(20, False), (4, True)], ids=["trace", "density"])
def test_eigenvalues_outlive_a_stop_in_what_follows_them(tmp_path: Path, num_probes: int, with_density: bool):
    file = tmp_path / "lanczos.json"
    options = SpectrumOptions(product="kept_graph", sam_rho=0.01, num_probes=num_probes)
    asked = {"top_k": 3, "options": options, "with_density": with_density}
    whole = analyzer().compute_spectrum(FIVE, top_k=3, options=SpectrumOptions(product="kept_graph"))

    def stop(num_products: int) -> None:
        if num_products > whole.num_products + 2:
            raise KeyboardInterrupt

    partial = analyzer().compute_spectrum(FIVE, **asked, state_file=file, on_product=stop)
    assert partial.status == SpectrumStatus.interrupted
    assert partial.eigenvalues == whole.eigenvalues
    assert partial.geometry is not None
    assert partial.trace is None
    resumed = analyzer().compute_spectrum(FIVE, **asked, state_file=file)
    assert resumed.status == SpectrumStatus.complete
    assert resumed.trace is not None
    at_once = analyzer().compute_spectrum(FIVE, **asked)
    assert resumed.num_products == at_once.num_products  # what follows Lanczos begins anew, uncounted
    assert resumed.eigenvalues == at_once.eigenvalues
    assert not file.exists()


def test_geometry_is_part_of_a_spectrum():
    found = analyzer().compute_spectrum(FIVE, top_k=2, options=SpectrumOptions(product="reverse", sam_rho=0.01))
    assert found.geometry is not None
    assert found.geometry.num_pairs == 5
    assert found.geometry.sam_sharpness == pytest.approx(0.01 * found.geometry.gradient_norm, rel=0.3)
    assert HessianSpectrum.from_json(found.to_json()) == found


def test_a_start_without_vectors_or_of_other_parameters_is_refused():
    quick = SpectrumOptions(product="reverse", tolerance=0.1)
    found = analyzer().compute_spectrum(FIVE, top_k=1, options=quick)
    with pytest.raises(ConfigError, match="start must have eigenvectors, which JSON does not hold"):
        analyzer().compute_spectrum(FIVE, top_k=1, start=HessianSpectrum.from_json(found.to_json()))
    with pytest.raises(ConfigError, match="give one of the same params"):
        analyzer(params="head").compute_spectrum(FIVE, top_k=1, start=found)
    with pytest.raises(ConfigError, match="start needs method=lanczos, got full; leave it out"):
        analyzer().compute_spectrum(FIVE, "full", top_k=1, start=found)


def test_options_that_a_method_leaves_out_are_named():
    head = analyzer(params="head")
    with pytest.warns(UserWarning, match="max_products=9 is not used by method=full; leave it out"):
        head.compute_spectrum(FIVE, "full", options=SpectrumOptions(max_products=9, product="reverse"))


def test_errors_over_pairs_take_pairs_of_one_prompt_as_one():
    shared = [replace(pair, prompt=FIVE[index // 2].prompt) for index, pair in enumerate(FIVE)]
    head = analyzer(params="head")
    for method in ("full", "gauss_newton_exact"):
        options = SpectrumOptions(num_sampled=1, product="reverse")
        found = head.compute_spectrum(shared, method, top_k=1, options=options)  # type: ignore[arg-type]
        batches = micro_batches(dense("bert").model, data=shared)
        prompts = {index: index // 2 for index in range(len(shared))}
        by_prompt, by_pair = (
            head.compute_spectrum(batches, method, top_k=1, options=options, prompts=given)  # type: ignore[arg-type]
            for given in (prompts, None)
        )
        assert found.sampling[0].high == pytest.approx(by_prompt.sampling[0].high, rel=1e-6)
        assert found.sampling[0].high != pytest.approx(by_pair.sampling[0].high, rel=1e-3)


@pytest.mark.parametrize("method", ["deflated", "hutchinson", "hutchpp", "xtrace"])
def test_the_trace_is_estimated_by_the_method_asked_for(method: str):
    head = analyzer(params="head")
    options = SpectrumOptions(product="reverse", num_probes=60, trace_method=method)  # type: ignore[arg-type]
    found = head.compute_spectrum(FIVE, top_k=1, options=options)
    exact = head.compute_spectrum(FIVE, "full", options=SpectrumOptions(product="reverse")).trace
    assert found.trace is not None
    assert exact is not None
    assert found.trace.value == pytest.approx(exact.value, abs=4 * (found.trace.standard_error or 0) + 1e-9)
    with pytest.raises(ConfigError, match="unknown trace_method 'xtrase'; did you mean 'xtrace'"):
        head.compute_spectrum(FIVE, top_k=1, options=SpectrumOptions(num_probes=9, trace_method="xtrase"))  # type: ignore[arg-type]
