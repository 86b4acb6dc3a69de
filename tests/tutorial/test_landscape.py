"""Landscapes as the documents call them: analyzer, spectrum and optimizer comparison, on a model from config."""

from __future__ import annotations

import json
import math
from importlib import import_module

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from rm_optimizer.core.data_loader import create_dataloader
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape import HessianAnalyzer, HessianSpectrum, SpectrumOptions
from tests.landscape.worlds import reward_model

ROWS = [
    {"prompt": f"one {i // 2} two", "chosen": f"three {i * 7 % 11} four", "rejected": f"five {'six ' * (i % 4)}"}
    for i in range(12)
]
PAIRS = [PreferencePair(**row) for row in ROWS]


@pytest.fixture(scope="module")
def model():
    return reward_model("llama")


@pytest.fixture(scope="module")
def spectrum(model) -> HessianSpectrum:
    return HessianAnalyzer(model, params="head").compute_spectrum(PAIRS, top_k=3)


def values(spectrum: HessianSpectrum) -> dict[str, object]:
    """Everything that is stored, without the costs."""
    costs = ("wall_seconds", "product_reason", "gradients_per_product")
    return {name: value for name, value in json.loads(spectrum.to_json()).items() if name not in costs}


def test_a_loader_gives_the_spectrum_of_its_pairs_to_the_bit(model, tmp_path):
    analyzer, options = HessianAnalyzer(model, params="head"), SpectrumOptions(num_sampled=2, product="reverse")
    expected = values(analyzer.compute_spectrum(PAIRS, top_k=3, options=options))
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    loaders = (
        create_dataloader(path, model.tokenizer, batch_size=5),
        create_dataloader(PAIRS, model, batch_size=3, seed=7),
        create_dataloader(ROWS, model, shuffle=False, micro_token_budget=60),
    )
    for loader in loaders:
        assert values(analyzer.compute_spectrum(loader, top_k=3, options=options)) == expected
        some = {"top_k": 2, "num_pairs": 6, "options": options}
        assert values(analyzer.compute_spectrum(loader, **some)) == values(analyzer.compute_spectrum(PAIRS, **some))


def test_tables_rows_and_files_give_the_spectrum_of_their_pairs(model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    table = pa.Table.from_pylist(ROWS)
    analyzer, options = HessianAnalyzer(model, params="head"), SpectrumOptions(product="reverse")
    expected = values(analyzer.compute_spectrum(PAIRS, top_k=2, options=options))
    sources = (PreferenceDataset(PAIRS), ROWS, table, table.to_pandas(), table.to_pydict(), path, str(path))
    for source in sources:
        assert values(analyzer.compute_spectrum(source, top_k=2, options=options)) == expected
    with pytest.raises(TypeError, match="pairs must be pairs, a data set, a file or a loader of pairs, got int"):
        analyzer.compute_spectrum(7)


def test_a_plain_loader_of_tensors_is_used_as_it_is(model):
    data = PreferenceDataset(PAIRS, model)
    analyzer, options = HessianAnalyzer(model, params="head"), SpectrumOptions(product="reverse", tolerance=1e-5)
    expected = analyzer.compute_spectrum(PAIRS, top_k=2, options=options)
    found = analyzer.compute_spectrum(DataLoader(data, batch_size=4), top_k=2, options=options)
    assert found.eigenvalues == pytest.approx(expected.eigenvalues, rel=1e-4, abs=1e-6)
    with pytest.raises(ConfigError, match="num_pairs draws from pairs"):
        analyzer.compute_spectrum(DataLoader(data, batch_size=4), num_pairs=4)


def test_a_loader_that_reads_text_otherwise_is_refused(model):
    loader = create_dataloader(PAIRS, model, max_length=24)
    with pytest.raises(ConfigError, match="and its max_length differ; make it with create_dataloader"):
        HessianAnalyzer(model, params="head").compute_spectrum(loader)


def test_the_numbers_of_a_spectrum_are_floats_with_their_definitions(model, spectrum):
    assert spectrum.trace is not None
    assert spectrum.trace_estimate == spectrum.trace.value
    assert spectrum.top_eigenvalue == spectrum.eigenvalues[0]
    assert spectrum.flatness_index == pytest.approx(1 / spectrum.eigenvalues[0])
    magnitudes = sorted(map(abs, spectrum.eigenvalues), reverse=True)
    assert spectrum.condition_number <= magnitudes[0] / min(magnitudes) * (1 + 1e-6)
    score = spectrum.eigenvalues[0] / spectrum.trace.value
    assert math.isnan(spectrum.sharpness_score) or spectrum.sharpness_score == pytest.approx(score)


def test_the_effective_rank_is_that_of_the_gauss_newton_matrix(model, spectrum):
    whole = HessianAnalyzer(model, params="head").compute_spectrum(PAIRS, "gauss_newton_exact", top_k=2)
    shares = np.array(whole.eigenvalues) / sum(whole.eigenvalues)
    expected = np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
    assert spectrum.effective_rank == pytest.approx(expected, rel=1e-5)
    assert whole.effective_rank == pytest.approx(expected, rel=1e-5)
    little = SpectrumOptions(effective_rank=True, memory_gib=200 / 2**30)
    bounded = HessianAnalyzer(model, params="head").compute_spectrum(PAIRS, "full", options=little)
    assert math.isnan(bounded.effective_rank)
    assert "raise memory_gib" in (bounded.quantities["effective_rank"].reason or "")
    plain = HessianAnalyzer(model, params="head").compute_spectrum(PAIRS, top_k=1, options=SpectrumOptions())
    assert math.isnan(plain.effective_rank)
    assert plain.quantities["effective_rank"].reason == "it was not computed; set effective_rank=True"


def test_a_spectrum_prints_its_numbers_in_few_lines(spectrum):
    lines = repr(spectrum).splitlines()
    assert lines[0] == "HessianSpectrum"
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    for name in ("top_eigenvalue", "trace_estimate", "condition_number", "effective_rank", "flatness_index"):
        assert any(line.strip().startswith(f"{name}: ") for line in lines), name
    assert f"top_eigenvalue: {spectrum.eigenvalues[0]:.5g}" in str(spectrum)


def test_a_spectrum_draws_itself_and_gives_a_frame(spectrum):
    assert isinstance(spectrum.plot(), Figure)
    assert "<th>effective_rank</th>" in spectrum._repr_html_()
    frame = spectrum.to_pandas()
    assert list(frame["eigenvalue"]) == list(spectrum.eigenvalues)
    assert frame["end"].tolist() == ["largest"] * 3 + ["smallest"] * 3
    assert HessianSpectrum.from_json(spectrum.to_json()) == spectrum


@pytest.mark.parametrize("method", ["power_iteration", "full", "lanczos"])
def test_the_methods_agree_on_the_largest_eigenvalue(model, method):
    analyzer = HessianAnalyzer(model, device="cpu", params="head")
    found = analyzer.compute_spectrum(PAIRS, method=method, top_k=2)
    full = analyzer.compute_spectrum(PAIRS, method="full")
    assert found.top_eigenvalue == pytest.approx(full.top_eigenvalue, rel=1e-3)
    assert len(full.eigenvalues) == full.num_parameters


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rm_optimizer.landscape.hessian", "HessianSpectrum"),
        ("rm_optimizer.landscape.hessian", "HessianAnalyzer"),
        ("rm_optimizer.landscape.visualization", "plot_spectrum"),
        ("rm_optimizer.landscape.visualization", "plot_surface"),
        ("rm_optimizer.landscape.optimizer_comparison", "OptimizerComparison"),
        ("rm_optimizer.landscape", "OptimizerComparison"),
    ],
)
def test_modules_of_the_documents_resolve(module, name):
    assert callable(getattr(import_module(module), name))
