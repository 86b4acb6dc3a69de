"""The edge of stability on quadratics: steps along the top eigenvector of `S H S` grow beyond the limit alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.optim.algorithms import SAM, ScheduleFreeAdamW, set_train_mode
from rm_optimizer.optim.stability import Stability, stability_of

CURVATURE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)


def stepped(optimizer: Optimizer, parameter: Tensor, gradients: list[Tensor]) -> None:
    set_train_mode(optimizer, True)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step(lambda: 0.0)


def sharpness(optimizer: Optimizer, parameter: Tensor) -> float:
    found = stability_of(optimizer).scales
    scale = torch.ones(2, dtype=torch.float64) if found is None else found[parameter]
    return float(torch.linalg.eigvalsh(scale[:, None] * CURVATURE * scale)[-1])


@pytest.mark.parametrize(("share", "grows"), [(0.98, False), (1.02, True)])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_diverges_on_a_quadratic_beyond_the_limit_alone(options: dict, share: float, grows: bool):
    point = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    unit = stability_of(torch.optim.SGD([point], lr=1.0, **options)).limit
    optimizer = torch.optim.SGD(
        [point], lr=share * unit / sharpness(torch.optim.SGD([point], lr=1.0), point), **options
    )
    for _ in range(3000):
        point.grad = CURVATURE @ point.detach()
        optimizer.step()
    assert bool(point.norm() > 1) == grows


@pytest.mark.parametrize(("share", "grows"), [(0.98, False), (1.02, True)])
@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_with_frozen_moments_diverges_beyond_the_limit_alone(rule: type, share: float, grows: bool):
    point = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = rule([point], lr=1.0, betas=(0.9, 1 - 1e-8), eps=0.1, weight_decay=0.0)
    stepped(optimizer, point, [torch.ones(2, dtype=torch.float64)])
    state = {"exp_avg_sq": torch.tensor([0.09, 4.0], dtype=torch.float64), "step": torch.tensor(1e12)}
    optimizer.state[point].update(state)
    assert stability_of(optimizer).limit == pytest.approx(38)
    optimizer.param_groups[0]["lr"] = share * 38 / sharpness(optimizer, point)
    with torch.no_grad():
        point.fill_(1e-9)
        optimizer.state[point]["exp_avg"].zero_()
    for _ in range(1500):
        point.grad = CURVATURE @ point.detach()
        optimizer.step()
        if point.detach().norm() > 1e-3:
            break
    assert bool(point.norm() > 1e-5) == grows


def adam_scale(gradient: Tensor, eps: float = 1e-8, share: float = 1.0) -> Tensor:
    return (share * (gradient.abs() + eps)).rsqrt()


def test_scales_are_those_of_constant_gradients():
    from pytorch_optimizer import MARS, AdEMAMix, Prodigy

    gradient = torch.tensor([0.3, 2.0])
    rows = {
        "adam": (torch.optim.Adam, {"lr": 0.1}, 1 - 0.9**3),
        "ademamix": (AdEMAMix, {"lr": 0.1}, 1 - 0.9**3),
        "schedulefree": (
            ScheduleFreeAdamW, {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_lr_power": 2.0}, 1.0,
        ),
        "prodigy": (Prodigy, {"lr": 1.0, "bias_correction": True}, None),
        "mars": (MARS, {"lr": 0.1, "lr_1d": 0.1, "betas_1d": (0.9, 0.999), "betas": (0.9, 0.999)}, 1 - 0.9**3),
    }  # fmt: skip
    for name, (rule, options, share) in rows.items():
        point = torch.ones(2, requires_grad=True)
        optimizer = rule([point], **options)
        stepped(optimizer, point, [gradient] * 3)
        scales = stability_of(optimizer).scales
        assert scales is not None, name
        if share is None:
            ratio = scales[point] / adam_scale(gradient)
            torch.testing.assert_close(ratio, ratio.mean().expand(2))
        else:
            torch.testing.assert_close(scales[point], adam_scale(gradient, share=share), msg=name)


def test_unused_weights_rates_and_factored_moments():
    table, head = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)

    def groups() -> list[dict]:
        return [{"params": [table], "lr": 0.1}, {"params": [head], "lr": 0.4}]

    adam = SAM(torch.optim.AdamW(groups()), rho=0.0)
    assert stability_of(adam) == Stability(None, None)  # before the first step
    at_the_end = torch.optim.SGD([{"params": [table], "lr": 0.0}])
    assert stability_of(at_the_end) == Stability(None, None)
    row, column = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0, 0.0])
    for optimizer in (adam, torch.optim.Adafactor(groups(), eps=(None, 1e-3))):
        table.grad, head.grad = torch.outer(row, column), torch.ones(2)
        optimizer.step(lambda: 0.0)
        scales = stability_of(optimizer).scales
        assert scales is not None
        assert not scales[table][:, 2].any()
        ratio = scales[table][:, :2] * torch.outer(row, column[:2]).sqrt()
        torch.testing.assert_close(ratio, ratio.flatten()[0].expand(2, 2), rtol=1e-4, atol=0)
    adam_scales = stability_of(adam).scales
    assert float(adam_scales[head][0] / adam_scales[table][0, 0]) == pytest.approx(2 * 0.5**0.5, rel=1e-4)
    sgd = stability_of(torch.optim.SGD(groups(), lr=0.1))
    assert sgd.limit == pytest.approx(2 / 0.4)
    assert float(sgd.scales[table][0, 0]) == pytest.approx(0.5)
    assert stability_of(torch.optim.Muon([table], lr=0.1)).limit is None


def test_around_adam_sam_grows_at_half_of_adams_limit_and_has_none_of_its_own():
    """Near a minimum the ascent step `rho g / ||g||` is longer than the way there: no sharpness bounds the growth."""

    def growth(rho: float) -> float:
        point = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        base = torch.optim.AdamW([point], lr=1.0, betas=(0.9, 1 - 1e-8), eps=0.1, weight_decay=0.0)
        optimizer = SAM(base, rho=0.0)
        stepped(optimizer, point, [torch.ones(2, dtype=torch.float64)])
        assert stability_of(optimizer).limit is None
        optimizer.state[point].update(
            exp_avg_sq=torch.tensor([0.09, 4.0], dtype=torch.float64), step=torch.tensor(1e12)
        )
        optimizer.state[point]["exp_avg"].zero_()
        optimizer.rho, optimizer.param_groups[0]["lr"] = rho, 0.5 * 38 / sharpness(optimizer, point)
        with torch.no_grad():
            point.fill_(1e-9)

        def closure() -> float:
            point.grad = CURVATURE @ point.detach()
            return 0.0

        for _ in range(300):
            optimizer.step(closure)
        return float(point.detach().norm()) / 1e-9

    assert growth(rho=0.0) < 1
    assert growth(rho=0.05) > 1e3
