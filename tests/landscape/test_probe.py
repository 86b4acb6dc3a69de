"""The measurement during training follows the Hessian's top eigenvalue and trace from step to step."""

from __future__ import annotations

import torch

from rm_optimizer.core.curvature import MeasureCurvature
from rm_optimizer.landscape.dense import dense_matrix
from rm_optimizer.landscape.differences import GradientDifferences
from rm_optimizer.landscape.objective import measuring
from rm_optimizer.landscape.operators import HessianOperator
from rm_optimizer.landscape.probe import FIRST_PRODUCTS, measure_curvature
from tests.landscape.worlds import EVERYTHING, micro_batches, reward_model


def test_readings_follow_the_weights() -> None:
    model = reward_model("llama")
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name or "score" in name)
    batches = micro_batches(model)
    measure: MeasureCurvature = measure_curvature
    read = measure(model, batches, EVERYTHING)
    for step in range(3):
        reading = read()
        with measuring(model, batches, EVERYTHING) as objective:
            matrix = dense_matrix(HessianOperator(objective, product="kept_graph"))
        values = torch.linalg.eigvalsh(matrix)
        assert (values - reading.top_eigenvalue).abs().min() <= reading.residual + 1e-2 * reading.top_eigenvalue
        assert abs(reading.top_eigenvalue - float(values[-1])) < 0.1 * float(values[-1])
        assert abs(reading.trace.value - float(values.sum())) < 4 * reading.trace.standard_error  # type: ignore[operator]
        assert reading.num_pairs == 8
        assert reading.num_products <= (FIRST_PRODUCTS if step == 0 else 2) + 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.01


def test_differences_are_near_the_exact_products_and_leave_the_weights() -> None:
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


def test_readings_do_not_depend_on_what_was_drawn_before() -> None:
    model = reward_model("bert")
    batches = micro_batches(model)
    first = measure_curvature(model, batches, EVERYTHING)()
    torch.rand(7)
    assert measure_curvature(model, batches, EVERYTHING)() == first
