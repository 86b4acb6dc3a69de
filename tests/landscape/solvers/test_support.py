"""Embeddings that no pair looks up are left out of vectors, and of nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import HessianOperator, OutputOperator
from rm_optimizer.landscape.operators.gauss_newton import gauss_newton_exact
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.support import SupportedOperator, support_of
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.builders import fresh_reward_model
from tests.landscape.worlds import EVERYTHING, FAMILIES, PLAIN, SHAPE, micro_batches, pairs, reward_model

FEW = pairs()[:2]
TABLES = {"bert": "*word_embeddings*", "llama": "*embed_tokens*"}


def of_many_tokens(family: str) -> BradleyTerryRM:
    """More than is spared of those that no pair holds."""
    tokenizer = train_tokenizer(rendered_texts(FEW), 280)
    tokenizer.add_tokens([f"<unused {i}>" for i in range(2000 - len(tokenizer))])
    return fresh_reward_model(family, tokenizer, max_length=48, fields=SHAPE)


@pytest.mark.parametrize(("family", "packed"), [("bert", False), ("llama", False), ("llama", True)])
def test_what_is_left_out_is_zero_in_every_product(family: str, packed: bool):
    model = reward_model(family)
    batches = micro_batches(model, 100, packed=packed, data=FEW)
    with measuring(model, batches, EVERYTHING, dtype=torch.float64) as objective:
        support = support_of(objective, 0)
        vectors = torch.randn(2, objective.subset.num_parameters, generator=torch.Generator().manual_seed(0)).double()
        for operator in (HessianOperator(objective, product="reverse"), OutputOperator(objective, "fisher")):
            whole = operator.apply(vectors)
            assert torch.equal(support.widen(support.narrow(whole)), whole)
            found = SupportedOperator(operator, support).apply(support.narrow(vectors))
            torch.testing.assert_close(support.widen(found), whole, rtol=1e-12, atol=1e-15)
        table = model.get_parameter(next(name for name in objective.subset.names if "embed" in name))
        (plain,) = micro_batches(model, data=FEW)
        tokens = plain.input_ids.unique()
    left_out = objective.subset.num_parameters - support.dimension
    unused = 8 * (len(table) - len(tokens))
    others = 8 * 48 if family == "bert" else 8  # positions; the padding token where nothing is padded
    assert unused <= left_out <= unused + others


@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_of_pairs_hold_no_embeddings_that_no_pair_looks_up(blocks: int):
    model = of_many_tokens("llama")
    with measuring(model, micro_batches(model, data=FEW), PLAIN, dtype=torch.float64) as objective:
        rows_bytes = len(FEW) * 8 * support_of(objective, 0).dimension
        gram = gauss_newton_exact(objective, num_vectors=2, memory_bytes=-(-rows_bytes // blocks))
        images = OutputOperator(objective, "gauss_newton").apply(gram.vectors)
    torch.testing.assert_close(images, torch.from_numpy(gram.values[:2].copy())[:, None] * gram.vectors)
    assert gram.num_passes == (1 if blocks == 1 else 2 * blocks)


@pytest.mark.parametrize("use", ["in arithmetic", "unseen", "by its address"])
def test_a_table_of_which_more_is_used_than_it_looks_up_stays_whole(use: str, monkeypatch: pytest.MonkeyPatch):
    model = reward_model("llama")
    table = model.model.get_input_embeddings()
    rows = table.weight.detach().clone()
    if use == "unseen":
        monkeypatch.setattr(table, "forward", lambda ids: rows[ids] * float(table.weight.shape == rows.shape))
    elif use == "by its address":
        table.register_forward_hook(lambda module, inputs, output: output * float(module.weight.data_ptr() > 0))
    else:
        table.register_forward_hook(lambda module, inputs, output: output + module.weight.mean())
    with measuring(model, micro_batches(model, data=FEW), EVERYTHING) as objective:
        assert support_of(objective, 0).dimension == objective.subset.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_the_support_does_not_depend_on_micro_batches(family: str):
    model, found = reward_model(family), set()
    for budget in (1, 100_000):  # without padding, and with
        with measuring(model, micro_batches(model, budget, data=FEW), EVERYTHING) as objective:
            found.add(support_of(objective, 16).identity)
    assert len(found) == 1


def test_a_process_without_pairs_looks_nothing_up():
    model = reward_model("llama")
    with measuring(model, micro_batches(model, data=FEW), EVERYTHING) as objective:
        nothing = PairObjective(objective.model, [], EVERYTHING, objective.subset, None)
        nothing.total_weight = 1.0
        assert support_of(nothing, 0).dimension < 0.5 * objective.subset.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_that_are_wanted_are_found(family: str):
    model = of_many_tokens(family)
    with measuring(model, micro_batches(model, data=FEW), PLAIN, params=TABLES[family]) as objective:
        assert support_of(objective).dimension < 0.5 * objective.subset.num_parameters
    analyzer = HessianAnalyzer(model, params=TABLES[family], dtype=torch.float64)
    options = SpectrumOptions(which="smallest", tolerance=1e-6)
    found = analyzer.compute_spectrum(FEW, top_k=6, matrix="gauss_newton", options=options)
    assert len(found.eigenvalues) == 6
    assert max(map(abs, found.eigenvalues)) < 1e-12
    whole = analyzer.compute_spectrum(FEW, "gauss_newton_exact", top_k=2)
    top = analyzer.compute_spectrum(FEW, top_k=4, matrix="gauss_newton", options=SpectrumOptions(which="largest"))
    assert top.eigenvalues == pytest.approx([*whole.eigenvalues[:2], 0, 0], abs=1e-12)
    assert top.eigenvectors is not None
    assert top.eigenvectors.shape == (4, top.num_parameters)


def test_a_state_holds_no_more_than_what_is_left_and_goes_on_for_another_top_k(tmp_path: Path):
    file = tmp_path / "lanczos.json"

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    analyzer = HessianAnalyzer(of_many_tokens("llama"))
    options = SpectrumOptions(product="reverse", tolerance=1e-2)
    found = analyzer.compute_spectrum(FEW, top_k=3, options=options, state_file=file, on_iteration=stop)
    assert json.loads(file.read_text())["dimension"] < 0.5 * found.num_parameters
    assert found.eigenvectors is not None
    assert found.eigenvectors.shape[1] == found.num_parameters
    again = analyzer.compute_spectrum(FEW, top_k=1, options=options, state_file=file)
    fresh = analyzer.compute_spectrum(FEW, top_k=1, options=options)
    assert again.eigenvalues == fresh.eigenvalues
    assert again.num_products == fresh.num_products  # those before the stop included, none of them repeated


def test_a_start_from_other_pairs_is_no_start():
    model = reward_model("llama")
    analyzer, options = HessianAnalyzer(model, dtype=torch.float64), SpectrumOptions(which="largest", product="reverse")
    first = analyzer.compute_spectrum(FEW, top_k=1, options=options)
    assert first.eigenvectors is not None
    elsewhere = replace(first, eigenvectors=torch.zeros_like(first.eigenvectors))
    again = analyzer.compute_spectrum(FEW, top_k=1, options=options, start=elsewhere)
    assert again.eigenvalues == first.eigenvalues
