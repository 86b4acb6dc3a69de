"""The measurement during training follows the Hessian's top eigenvalue and trace from step to step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rm_optimizer.evaluation.draws import MeasurementFactory
from rm_optimizer.landscape import training_curvature
from rm_optimizer.landscape.operators.base import HessianOperator, MatrixOperator
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.solvers.reference import dense_matrix
from rm_optimizer.landscape.training_curvature import (
    FIRST_PRODUCTS,
    NUM_PROBES,
    GradientDifferences,
    measure_curvature,
)
from tests.landscape.worlds import EVERYTHING, micro_batches, reward_model


def test_measurements_follow_the_weights():
    model = reward_model("llama")
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name or "score" in name)
    batches = micro_batches(model)
    make: MeasurementFactory = measure_curvature
    measure = make(model, batches, EVERYTHING)
    for _ in range(3):
        measured = measure()
        with measuring(model, batches, EVERYTHING) as objective:
            matrix = dense_matrix(HessianOperator(objective, product="kept_graph"))
        values = torch.linalg.eigvalsh(matrix)
        assert (values - measured.top_eigenvalue).abs().min() <= measured.residual + 1e-2 * measured.top_eigenvalue
        assert abs(measured.top_eigenvalue - float(values[-1])) < 0.1 * float(values[-1])
        deviation = float((2 * values[:-1].square().sum()).sqrt())  # at most, of one probe with the top taken out
        assert abs(measured.trace.value - float(values.sum())) < 4 * deviation
        assert measured.trace.num_samples == NUM_PROBES
        assert measured.num_pairs == 8
        assert measured.num_products <= FIRST_PRODUCTS
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.01


def test_preconditioned_sharpness_is_the_largest_eigenvalue_in_the_scale(monkeypatch: pytest.MonkeyPatch):
    model = reward_model("llama")
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("score" in name)
    batches, generator = micro_batches(model), torch.Generator().manual_seed(3)
    scales = {name: torch.rand(p.shape, generator=generator) for name, p in model.named_parameters() if p.requires_grad}
    measure, totals, numbers = measure_curvature(model, batches, EVERYTHING), list[object](), list[object]()
    for spent, method in ((totals, "total"), (numbers, "summed_shares")):
        compute = getattr(PairObjective, method)
        monkeypatch.setattr(
            PairObjective, method, lambda *given, spent=spent, compute=compute: spent.append(0) or compute(*given)
        )
    for _ in range(2):
        totals.clear(), numbers.clear()
        measured = measure(scales)
        assert measured.num_gradients == pytest.approx(len(totals) + (len(numbers) - 1) / 3)  # one with the gradient
        assert measured.num_gradients_next == 6
        with measuring(model, batches, EVERYTHING) as objective:
            matrix = dense_matrix(HessianOperator(objective, product="kept_graph"))
            scale = torch.cat([scales[name].flatten() for name in objective.subset.names])
        sharpness = float(torch.linalg.eigvalsh(scale[:, None] * matrix * scale)[-1])
        assert measured.preconditioned_sharpness == pytest.approx(sharpness, rel=0.02)
        assert measured.num_products <= 2 * FIRST_PRODUCTS
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.01


def test_differences_are_near_the_exact_products_and_leave_the_weights():
    for family in ("bert", "llama"):
        model = reward_model(family)
        batches = micro_batches(model, 150)
        before = [parameter.clone() for parameter in model.parameters()]
        for dtype, tolerance in ((torch.float32, 0.03), (torch.float64, 1e-4)):
            vectors = torch.randn(2, sum(map(torch.numel, before)), generator=torch.Generator().manual_seed(0))
            with measuring(model, batches, EVERYTHING, dtype=dtype, twice=False) as objective:
                near = GradientDifferences(objective).apply(torch.cat([vectors, torch.zeros_like(vectors[:1])]))
            with measuring(model, batches, EVERYTHING, dtype=dtype) as objective:
                exact = HessianOperator(objective, product="reverse").apply(vectors.to(dtype))
            assert ((near[:2] - exact).norm(dim=1) < tolerance * exact.norm(dim=1)).all()
            assert not near[2].any()
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_numbers_from_the_loss_alone_are_those_of_the_exact_products():
    for family in ("bert", "llama"):
        model = reward_model(family)
        batches = micro_batches(model, 150)
        before = [parameter.clone() for parameter in model.parameters()]
        for dtype, tolerance in ((torch.float32, 0.05), (torch.float64, 1e-3)):
            size = sum(map(torch.numel, before))
            signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)).to(dtype).mul_(2).sub_(1)
            with measuring(model, batches, EVERYTHING, dtype=dtype) as objective:
                gradient = objective.gradient()
                exact = HessianOperator(objective, product="reverse")
                expected = [float(vector @ exact.apply(vector[None])[0]) for vector in (signs, gradient)]
            with measuring(model, batches, EVERYTHING, dtype=dtype, twice=False) as objective:
                near = GradientDifferences(objective)
                assert [near.along(signs), near.along(gradient)] == pytest.approx(expected, rel=tolerance)
                assert near.along(torch.zeros_like(signs)) == 0
                assert near.num_products == 0
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_measurements_of_one_matrix_have_one_trace_and_intervals_that_hold_it(monkeypatch: pytest.MonkeyPatch):
    values = torch.linspace(-1, 3, 200, dtype=torch.float64)
    matrix = Moving(rotated(values))
    monkeypatch.setattr(training_curvature, "GradientDifferences", lambda objective: matrix)
    model = reward_model("llama")
    batches = micro_batches(model)
    held = []
    for seed in range(40):
        measure = measure_curvature(model, batches, EVERYTHING, seed=seed)
        first, second = measure().trace, measure().trace
        assert first == second
        held.append(first.low <= float(values.sum()) <= first.high)  # type: ignore[operator]
    assert sum(held) >= 34  # 0.95 less three standard errors of 40 repetitions


def test_a_top_eigenvector_that_turned_by_half_is_found_in_one_measurement(monkeypatch: pytest.MonkeyPatch):
    bulk = torch.linspace(-6, 6, 296, dtype=torch.float64)
    before = rotated(torch.cat([bulk, bulk.new_tensor([6.0, 6.2, 6.4, 7.7])]))
    direction = torch.randn(300, generator=torch.Generator().manual_seed(1)).double() / 300**0.5
    after = before + 12 * direction.outer(direction)
    found = measured_values(monkeypatch, [before, before, after])
    assert found[-1] == pytest.approx(float(torch.linalg.eigvalsh(after)[-1]), rel=0.1)


def test_measurements_do_not_depend_on_what_was_drawn_before():
    model = reward_model("bert")
    batches = micro_batches(model)
    first = measure_curvature(model, batches, EVERYTHING)()
    torch.rand(7)
    assert measure_curvature(model, batches, EVERYTHING)() == first


class Moving(MatrixOperator):
    """A matrix in the place of the model's Hessian."""

    num_products = num_numbers = 0

    def along(self, vector: Tensor) -> float:
        return float(vector @ self.matrix @ vector)


def measured_values(monkeypatch: pytest.MonkeyPatch, matrices: list[Tensor]) -> list[float]:
    """Top eigenvalues by one measurement that sees these matrices one after another."""
    model = reward_model("llama")
    measure = measure_curvature(model, micro_batches(model), EVERYTHING, num_products=2)
    found = []
    for matrix in matrices:
        monkeypatch.setattr(training_curvature, "GradientDifferences", lambda objective, matrix=matrix: Moving(matrix))
        found.append(measure().top_eigenvalue)
    return found


def rotated(values: Tensor) -> Tensor:
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(0)).double()).Q
    return turn @ torch.diag(values) @ turn.T


def test_measurements_follow_an_eigenvalue_that_overtakes_the_top(monkeypatch: pytest.MonkeyPatch):
    bulk = torch.linspace(-1, 3, 298, dtype=torch.float64)
    seconds = [9.0, 9.5, 10.5, 11.5, 12.5, 13.5]
    crossing = [rotated(torch.cat([bulk, bulk.new_tensor([second, 10.0])])) for second in seconds]
    found = measured_values(monkeypatch, [crossing[0]] * 4 + crossing)  # the first ones settle on the top eigenvector
    for value, second in zip(found[4:], seconds, strict=True):
        assert value == pytest.approx(max(10.0, second), rel=0.02)
        assert value <= max(10.0, second) + 1e-9


def test_measurements_of_one_matrix_climb_to_its_top_within_a_few(monkeypatch: pytest.MonkeyPatch):
    values = torch.linspace(-1, 8, 300, dtype=torch.float64)
    values[-2:] = torch.tensor([10.0, 9.0])
    before = rotated(values)
    direction = torch.randn(300, generator=torch.Generator().manual_seed(1)).double() / 300**0.5
    after = before + 11 * direction.outer(direction)  # the new top is nearly at right angles to the old one
    top = float(torch.linalg.eigvalsh(after)[-1])
    found = measured_values(monkeypatch, [before, *[after] * 6])
    assert found[-1] == pytest.approx(top, rel=0.01)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found[1:]))
