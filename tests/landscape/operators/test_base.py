"""Products equal those with dense matrices of known form, however pairs are split, padded, shared or multiplied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import PairBatch
from rm_optimizer.errors import ConfigError, RMOptimizerError, TrainingDiverged
from rm_optimizer.landscape.estimates.quantities import local_geometry, loss_at
from rm_optimizer.landscape.operators.base import HessianOperator, OutputOperator
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.products import PRODUCT_METHODS, KeptGraph, choose_product
from rm_optimizer.landscape.solvers.reference import dense_matrix
from rm_optimizer.schema import LossConfig
from tests.landscape.worlds import (
    EVERYTHING,
    FAMILIES,
    INNER,
    PLAIN,
    dense,
    loss_of_vector,
    micro_batches,
    pairs,
    reward_model,
)

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def random_vectors(size: int, count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def point(objective: PairObjective) -> Tensor:
    return objective.subset.flatten(objective.parameters).detach()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> BradleyTerryRM:
    return reward_model(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_equal_those_with_the_dense_hessian(family: str):
    known = dense(family)
    torch.testing.assert_close(known.hessian, known.hessian.T, **EXACT)
    with measuring(known.model, known.batches, EVERYTHING, params=INNER, dtype=torch.float64) as objective:
        vectors = random_vectors(objective.subset.num_parameters)
        for method in PRODUCT_METHODS:
            found = HessianOperator(objective, product=method).apply(vectors)  # type: ignore[arg-type]
            torch.testing.assert_close(found, vectors @ known.hessian, **EXACT)


def test_products_equal_finite_differences_of_the_gradient(model: BradleyTerryRM):
    with measuring(model, micro_batches(model), EVERYTHING, dtype=torch.float64) as objective:
        vector = random_vectors(objective.subset.num_parameters, 1)
        gradient = torch.func.grad(loss_of_vector(objective))
        step = 1e-5
        start = point(objective)
        difference = (gradient(start + step * vector[0]) - gradient(start - step * vector[0])) / (2 * step)
        product = HessianOperator(objective, product="reverse").apply(vector)[0]
        assert (product - difference).norm() < 1e-6 * product.norm()  # rounding 1e-16 / 1e-5, curvature's change 1e-10


def test_the_head_has_the_closed_form_of_logistic_regression():
    model = reward_model("llama")
    loss = LossConfig(beta=1.5)
    batch = micro_batches(model, data=[replace(pair, label=1.0) for pair in pairs()])[0]
    with measuring(model, [batch], loss, params="head", dtype=torch.float64) as objective:
        features: list[Tensor] = []
        hook = objective.model.reward_head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        rewards = objective.model.rewards_of(objective.batches[0]).detach()
        hook.remove()
        x = features[0].detach()[0::2] - features[0].detach()[1::2]
        p = torch.sigmoid(1.5 * (rewards[0::2] - rewards[1::2]))
        weight = batch.weight.double()
        closed = 1.5**2 * x.T @ (x * (p * (1 - p) * weight)[:, None]) / weight.sum()
        torch.testing.assert_close(dense_matrix(HessianOperator(objective, product="reverse")), closed, **EXACT)
        torch.testing.assert_close(dense_matrix(OutputOperator(objective, "gauss_newton")), closed, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_gauss_newton_and_fisher_equal_their_definitions(family: str):
    known = dense(family)
    with measuring(known.model, known.batches, EVERYTHING, params=INNER, dtype=torch.float64) as objective:
        vectors = random_vectors(objective.subset.num_parameters)
        found = OutputOperator(objective, "gauss_newton").apply(vectors)
        torch.testing.assert_close(found, vectors @ known.gauss_newton, **EXACT)
        torch.testing.assert_close(OutputOperator(objective, "fisher").apply(vectors), vectors @ known.fisher, **EXACT)
    assert torch.linalg.eigvalsh(known.gauss_newton).min() > -1e-12


@pytest.mark.parametrize("budget", [1, 120, 100_000])
@pytest.mark.parametrize("packed", [False, True])
def test_invariant_to_split_padding_and_shared_prompts(budget: int, packed: bool):
    model = reward_model("llama")
    with measuring(model, micro_batches(model), EVERYTHING, dtype=torch.float64) as objective:
        vectors = random_vectors(objective.subset.num_parameters)
        together = HessianOperator(objective, product="reverse").apply(vectors)
    with measuring(model, micro_batches(model, budget, packed=packed), EVERYTHING, dtype=torch.float64) as objective:
        apart = HessianOperator(objective, product="reverse").apply(vectors)
    torch.testing.assert_close(apart, together, **EXACT)


def test_float32_products_are_within_its_rounding(model: BradleyTerryRM):
    batches = micro_batches(model)
    results = []
    for dtype in (torch.float32, torch.float64):
        with measuring(model, batches, PLAIN, dtype=dtype) as objective:
            vectors = random_vectors(objective.subset.num_parameters).to(dtype)
            results.append(HessianOperator(objective, product="reverse").apply(vectors).double())
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()


def test_weights_count_pairs_not_batches():
    model = reward_model("bert")
    doubled = [pair for pair in pairs() for _ in range(int(pair.weight))]
    repeated = [replace(pair, weight=1.0) for pair in doubled]
    results = []
    for data in (list(pairs()), repeated):
        with measuring(model, micro_batches(model, 200, data=data), PLAIN, dtype=torch.float64) as objective:
            vectors = random_vectors(objective.subset.num_parameters)
            results.append(HessianOperator(objective, product="reverse").apply(vectors))
    torch.testing.assert_close(*results, **EXACT)


CHANGES: dict[str, Callable[[BradleyTerryRM, PairBatch], object]] = {
    "a weight": lambda model, batch: model.reward_head.weight.add_(1e-3),
    "a weight's data": lambda model, batch: model.reward_head.weight.data.add_(1e-3),
    "a weight's sign": lambda model, batch: model.reward_head.weight.data.neg_(),
    "tokens": lambda model, batch: batch.input_ids.copy_(batch.input_ids.flip(0)),
    "weights of pairs": lambda model, batch: batch.weight.mul_(2),
}


@pytest.mark.parametrize("product", PRODUCT_METHODS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_products_raises(product: str, change: str):
    model = reward_model("bert")
    batches = micro_batches(model)
    with measuring(model, batches, PLAIN) as objective:
        operator = HessianOperator(objective, product=product)  # type: ignore[arg-type]
        vector = torch.ones(1, operator.dimension)
        operator.apply(vector)
        with torch.no_grad():
            CHANGES[change](model, batches[0])  # type: ignore[arg-type]
        with pytest.raises(RMOptimizerError, match="a weight or a batch changed between two products"):
            operator.apply(vector)


def test_an_operator_ends_with_its_measurement():
    model = reward_model("bert")
    with measuring(model, micro_batches(model), PLAIN, params="head") as objective:
        operator = HessianOperator(objective, product="reverse")
    with pytest.raises(RMOptimizerError, match="operator's measurement has ended"):
        operator.apply(torch.ones(1, operator.dimension))


def test_the_way_to_multiply_is_measured_and_reported():
    model = reward_model("bert")
    with measuring(model, micro_batches(model), PLAIN, params="head") as objective:
        choice = choose_product(objective)
        costs = choice.gradients_per_product
        assert choice.product.name == min(costs, key=costs.__getitem__)
        assert set(costs) == {"kept_graph"}
        assert choice.graph_bytes > 0
        tight = choose_product(objective, graph_memory_bytes=0)
        assert set(tight.gradients_per_product) == {"reverse", "forward"}
        assert "do not fit" in tight.reason
        with pytest.raises(ConfigError, match="unknown product 'revers'; did you mean 'reverse'"):
            choose_product(objective, "revers")  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_names_its_pairs():
    model = reward_model("bert")
    with torch.no_grad():
        model.reward_head.weight.fill_(torch.nan)
    with (
        measuring(model, micro_batches(model), PLAIN) as objective,
        pytest.raises(TrainingDiverged, match="NaN or infinite on pairs"),
    ):
        HessianOperator(objective, product="reverse").apply(torch.ones(1, objective.subset.num_parameters))


def test_local_geometry_equals_its_definitions():
    model = reward_model("bert")
    with measuring(model, micro_batches(model, 150), EVERYTHING, dtype=torch.float64) as objective:
        loss = loss_of_vector(objective)
        start = point(objective)
        gradient = torch.func.grad(loss)(start)
        operator = HessianOperator(objective, product="reverse")
        image = operator.apply(gradient[None])[0]
        found = local_geometry(objective, operator, rho=0.1)
        risen = float(loss(start + 0.1 * gradient / gradient.norm()) - loss(start))
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-9)
    assert found.sam_sharpness == pytest.approx(risen, rel=1e-9)
    assert found.gradient_curvature == pytest.approx(float(gradient @ image / gradient.square().sum()), rel=1e-9)
    cosine = torch.nn.functional.cosine_similarity(gradient, image, dim=0)
    assert found.gradient_alignment == pytest.approx(float(cosine), rel=1e-9)


def test_the_loss_elsewhere_leaves_the_weights():
    model = reward_model("bert")
    with measuring(model, micro_batches(model), PLAIN) as objective:
        before = point(objective)
        loss_at(objective, torch.ones_like(before))
        assert torch.equal(point(objective), before)


class OnceBackwards(torch.autograd.Function):
    """The identity, with a derivative whose own derivative is not implemented."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return NotBackwards.apply(gradient)


class NotBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("derivative for a fused kernel is not implemented")


def test_a_model_that_cannot_be_differentiated_twice_is_named():
    model = reward_model("bert")
    embeddings = model.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, inputs, output: OnceBackwards.apply(output))
    message = r"BertForSequenceClassification cannot be differentiated twice here \(kept_graph: derivative for a fused"
    with measuring(model, micro_batches(model), PLAIN) as objective, pytest.raises(ConfigError, match=message):
        choose_product(objective)


def test_released_graphs_are_built_again():
    model = reward_model("llama")
    with measuring(model, micro_batches(model, 200), PLAIN) as objective:
        product = KeptGraph(objective)
        vector = random_vectors(objective.subset.num_parameters, 1).float()
        first = product(vector)
        product.release()
        assert torch.equal(product(vector), first)


def test_graphs_of_the_trial_are_freed_when_they_are_released(monkeypatch: pytest.MonkeyPatch):
    saved: list[weakref.ref[Tensor]] = []

    class Watched(saved_tensors_hooks):
        def __init__(self, pack, unpack) -> None:  # type: ignore[no-untyped-def]
            def noted(tensor: Tensor) -> Tensor:
                packed: Tensor = pack(tensor)
                saved.append(weakref.ref(packed))
                return packed

            super().__init__(noted, unpack)

    monkeypatch.setattr("rm_optimizer.landscape.operators.products.saved_tensors_hooks", Watched)
    model = reward_model("llama")
    with measuring(model, micro_batches(model, 200), PLAIN) as objective:
        weights = {id(parameter) for parameter in model.parameters()}
        operator = HessianOperator(objective)
        vector = random_vectors(operator.dimension, 1).float()
        first = operator.apply(vector)
        assert sum(ref() is not None for ref in saved) > 50
        operator.release()
        gc.collect()
        assert [ref for ref in saved if ref() is not None and id(ref()) not in weights] == []
        assert torch.equal(operator.apply(vector), first)
