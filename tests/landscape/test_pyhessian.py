"""PyHessian gives our products and, where it converges, our top eigenvalue, and leaves the model as it was."""

from __future__ import annotations

import sys

import pytest
import torch

from rm_optimizer.errors import ConfigError, MissingExtra
from rm_optimizer.landscape import HessianAnalyzer, SpectrumOptions
from rm_optimizer.landscape.operators.base import HessianOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.solvers import reference
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.landscape.solvers.reference import PyHessianProblem, pyhessian_eigenpairs
from tests.landscape.worlds import EVERYTHING, FAMILIES, INNER, dense, micro_batches, pairs, reward_model


@pytest.fixture
def library() -> None:
    pytest.importorskip("pyhessian")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_products_are_ours(family: str, keep_graph: bool):
    from pyhessian.utils import hessian_vector_product

    model = reward_model(family)
    with measuring(model, micro_batches(model, 60), EVERYTHING) as objective:
        ours = HessianOperator(objective, product="reverse")
        vector = torch.randn(1, ours.dimension, generator=torch.Generator().manual_seed(0))
        problem, parts = PyHessianProblem(objective, keep_graph=keep_graph), objective.subset.unflatten(vector[0])
        assert len(problem.parts) == (1 if keep_graph else len(objective.batches))
        with problem.undone(0):
            peer = problem.open()
            found = (
                hessian_vector_product(peer.gradsH, peer.params, parts)
                if keep_graph
                else peer.dataloader_hv_product(parts)[1]
            )
        (expected,) = ours.apply(vector)
        assert (objective.subset.flatten(found) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_top_eigenvalue_is_ours_where_it_converges(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "MAX_ITERATIONS", 500)
    model = reward_model(family)
    batches = micro_batches(model)
    with measuring(model, batches, EVERYTHING, dtype=torch.float64) as objective:
        operator = HessianOperator(objective, product="kept_graph")
        truth = lanczos(operator, 1, which="magnitude", tolerance=1e-6)
        found = pyhessian_eigenpairs(operator, 1, tolerance=1e-7)
    assert found.values.item() == pytest.approx(truth.values.item(), rel=1e-3)
    assert found.residuals.item() < 0.05 * abs(found.values.item())


@pytest.mark.usefixtures("library")
def test_its_vectors_do_not_bias_trace_and_density():
    known = dense("bert")
    trace = float(known.hessian.trace())
    analyzer = HessianAnalyzer(known.model, loss=EVERYTHING, params=INNER, dtype=torch.float64)
    for asked in ({"num_probes": 40}, {"num_probes": 10, "probe_steps": 2}):
        options = SpectrumOptions(product="kept_graph", tolerance=0.1, **asked)  # type: ignore[arg-type]
        given = {"top_k": 10, "options": options, "with_density": "probe_steps" in asked}
        found = analyzer.compute_spectrum(pairs()[:5], "pyhessian", **given).trace  # type: ignore[arg-type]
        assert found is not None
        assert found.standard_error is not None
        assert abs(found.value - trace) < 4 * found.standard_error


@pytest.mark.usefixtures("library")
def test_the_analyzer_calls_it_and_leaves_no_trace():
    model = reward_model("bert")
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = [parameter.clone() for parameter in parameters], torch.get_rng_state()
    options = SpectrumOptions(product="kept_graph")
    found = HessianAnalyzer(model).compute_spectrum(pairs(), "pyhessian", top_k=2, options=options)
    assert found.method == "pyhessian"
    assert len(found.eigenvalues) == 2
    assert all(torch.equal(was, now) for was, now in zip(before[0], parameters, strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(parameter.grad is None for parameter in parameters[1:])


def test_without_it_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyhessian", None)
    with pytest.raises(MissingExtra, match=r"pyhessian is not installed; pip install 'rm-optimizer\[pyhessian\]'"):
        HessianAnalyzer(reward_model()).compute_spectrum(pairs(), "pyhessian", top_k=1)


def test_it_is_of_the_hessian_alone():
    with pytest.raises(ConfigError, match="method=pyhessian needs matrix=hessian, got fisher"):
        HessianAnalyzer(reward_model()).compute_spectrum(pairs(), "pyhessian", matrix="fisher")
