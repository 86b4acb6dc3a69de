"""Embeddings that no pair looks up are left out of vectors, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.lanczos import Progress
from rm_optimizer.landscape.objective import measuring
from rm_optimizer.landscape.operators import HessianOperator, OutputOperator
from rm_optimizer.landscape.solve import SpectrumOptions
from rm_optimizer.landscape.support import SupportedOperator, support_of
from tests.landscape.worlds import EVERYTHING, FAMILIES, micro_batches, pairs, reward_model

FEW = pairs()[:2]
TABLES = {"bert": "*word_embeddings*", "llama": "*embed_tokens*"}


@pytest.mark.parametrize(("family", "packed"), [("bert", False), ("llama", False), ("llama", True)])
def test_what_is_left_out_is_zero_in_every_product(family: str, packed: bool) -> None:
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


@pytest.mark.parametrize("use", ["elsewhere too", "unseen"])
def test_a_table_of_which_more_is_used_than_it_looks_up_stays_whole(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reward_model("llama")
    table = model.model.get_input_embeddings()
    if use == "unseen":
        monkeypatch.setattr(table, "forward", lambda ids: Gather.apply(table.weight, ids))
    else:
        table.register_forward_hook(lambda module, inputs, output: output + module.weight.mean())
    with measuring(model, micro_batches(model, data=FEW), EVERYTHING) as objective:
        assert support_of(objective, 0).dimension == objective.subset.num_parameters


class Gather(torch.autograd.Function):
    """A lookup that PyTorch's own function has no part in."""

    @staticmethod
    def forward(ctx, weight, ids):
        return weight.detach()[ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_that_are_wanted_are_found(family: str) -> None:
    model = reward_model(family)
    analyzer = HessianAnalyzer(model, params=TABLES[family], dtype=torch.float64)
    options = SpectrumOptions(which="smallest", tolerance=1e-6)
    found = analyzer.compute_spectrum(FEW, top_k=6, matrix="gauss_newton", options=options)
    assert len(found.eigenvalues) == 6
    assert max(map(abs, found.eigenvalues)) < 1e-12
    whole = analyzer.compute_spectrum(FEW, "full", matrix="gauss_newton")
    top = analyzer.compute_spectrum(FEW, top_k=4, matrix="gauss_newton", options=SpectrumOptions(which="largest"))
    assert top.eigenvalues == pytest.approx(whole.eigenvalues[:4], abs=1e-12)
    assert top.eigenvectors is not None
    assert top.eigenvectors.shape == (4, top.num_parameters)


def test_a_state_holds_no_more_than_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "lanczos.json"

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    model, options = reward_model("llama"), SpectrumOptions(state_file=file, product="reverse")
    found = HessianAnalyzer(model).compute_spectrum(FEW, top_k=1, options=options, on_iteration=stop)
    assert json.loads(file.read_text())["dimension"] < 0.5 * found.num_parameters
    assert found.eigenvectors is not None
    assert found.eigenvectors.shape[1] == found.num_parameters
