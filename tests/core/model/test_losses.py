"""The loss equals its formula, at every size of margin, and its gradient is the formula's."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rm_optimizer.core.model import losses
from rm_optimizer.core.model.losses import bradley_terry_loss, bradley_terry_pair_losses

LOG2 = math.log(2)


def pairs(num_pairs: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(2, num_pairs, dtype=torch.float64, generator=generator)
    return rewards[0], rewards[1]


def uniform(num_pairs: int = 7, seed: int = 1) -> Tensor:
    return torch.rand(num_pairs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def production() -> Iterator[ModuleType]:
    """The module as users import it, without the tests' shape checks."""
    spec = importlib.util.spec_from_file_location("losses_without_import_hook", losses.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"beta": 3.0}, {"label": torch.full((5,), 0.3)}])
def test_equal_rewards_cost_log_2(options: dict[str, object]):
    rewards = torch.full((5,), 2.5)
    assert bradley_terry_loss(rewards, rewards, **options).item() == pytest.approx(LOG2, rel=1e-6)


@pytest.mark.parametrize("margin", [1.0, -1.0, 0.25])
def test_loss_and_gradient_match_the_closed_form(margin: float):
    chosen = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(1, dtype=torch.float64))
    loss.backward()
    assert loss.item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-14)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1 / (1 + math.exp(margin)), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, 1e4])
def test_huge_margins_are_finite_with_the_right_gradient(size: float, dtype: torch.dtype):
    chosen = torch.tensor([size, -size], dtype=dtype, requires_grad=True)
    each = bradley_terry_pair_losses(chosen, torch.zeros(2, dtype=dtype))
    each.sum().backward()
    assert each.tolist() == [0.0, -chosen[1].item()]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("size", [1e3, 1e4, -1e4])
def test_a_smoothed_label_pulls_back_at_huge_margins(size: float):
    chosen = torch.tensor([size], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(1, dtype=torch.float64), label_smoothing=0.1)
    loss.backward()
    wrong = 0.1 if size > 0 else 0.9
    assert loss.item() == pytest.approx(wrong * abs(size), rel=1e-12)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(wrong * math.copysign(1, size), rel=1e-12)


def test_smoothing_mixes_the_loss_with_that_of_the_flipped_pair():
    chosen, rejected = pairs()
    straight = bradley_terry_pair_losses(chosen, rejected)
    flipped = bradley_terry_pair_losses(rejected, chosen)
    smoothed = bradley_terry_pair_losses(chosen, rejected, label_smoothing=0.2)
    torch.testing.assert_close(smoothed, 0.8 * straight + 0.2 * flipped)


def test_a_soft_label_is_both_orders_weighted():
    chosen, rejected = pairs()
    label = uniform()
    soft = bradley_terry_pair_losses(chosen, rejected, label=label)
    both = label * bradley_terry_pair_losses(chosen, rejected) + (1 - label) * bradley_terry_pair_losses(
        rejected, chosen
    )
    torch.testing.assert_close(soft, both)


def test_label_0_is_the_pair_turned_round():
    chosen, rejected = pairs()
    turned = bradley_terry_loss(rejected, chosen)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, label=torch.zeros_like(chosen)), turned)


def test_a_soft_label_is_least_at_its_own_log_odds():
    label = torch.tensor([0.8], dtype=torch.float64)
    chosen = torch.logit(label).requires_grad_()
    loss = bradley_terry_loss(chosen, torch.zeros(1, dtype=torch.float64), label=label)
    loss.backward()
    assert loss.item() == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2), rel=1e-14)
    assert chosen.grad is not None
    assert abs(chosen.grad.item()) < 1e-15


def test_margin_is_subtracted_inside_the_sigmoid():
    chosen, rejected = pairs()
    margin = uniform()
    shifted = bradley_terry_loss(chosen - margin, rejected, beta=2.0)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, margin=margin, beta=2.0), shifted)


def test_beta_scales_rewards():
    chosen, rejected = pairs()
    torch.testing.assert_close(
        bradley_terry_loss(chosen, rejected, beta=2.5), bradley_terry_loss(2.5 * chosen, 2.5 * rejected)
    )


def test_invariant_to_a_shared_shift():
    chosen, rejected = pairs()
    torch.testing.assert_close(
        bradley_terry_loss(chosen + 64.0, rejected + 64.0), bradley_terry_loss(chosen, rejected), rtol=1e-13, atol=0
    )


def test_weight_is_repetition_and_its_scale_is_free():
    chosen, rejected = pairs(3)
    weight = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    counts = weight.long()
    repeated = bradley_terry_loss(
        chosen.repeat_interleave(counts), rejected.repeat_interleave(counts), center_rewards=0.1
    )
    for scale in (1.0, 0.01):
        weighted = bradley_terry_loss(chosen, rejected, weight=scale * weight, center_rewards=0.1)
        torch.testing.assert_close(weighted, repeated)


def test_regularizers_are_added_in_closed_form():
    chosen, rejected = pairs()
    plain = bradley_terry_loss(chosen, rejected, beta=2.0)
    regularized = bradley_terry_loss(chosen, rejected, beta=2.0, center_rewards=0.3, reward_l2=0.7)
    expected = plain + 0.3 * ((chosen + rejected) ** 2).mean() + 0.7 * ((chosen**2 + rejected**2) / 2).mean()
    torch.testing.assert_close(regularized, expected)


def test_pair_losses_of_any_split_add_up_to_the_whole():
    chosen, rejected = pairs(9)
    options = {"label_smoothing": 0.1, "center_rewards": 0.2, "reward_l2": 0.1}
    whole = bradley_terry_loss(chosen, rejected, **options)
    parts = [bradley_terry_pair_losses(chosen[k], rejected[k], **options).sum() for k in (slice(0, 2), slice(2, 9))]
    torch.testing.assert_close(sum(parts) / 9, whole)


def test_gradcheck_with_every_term():
    chosen, rejected = (side.clone().requires_grad_() for side in pairs(4))
    margin, label, weight = (uniform(4, seed).requires_grad_() for seed in (2, 3, 4))

    def loss(c: Tensor, r: Tensor, m: Tensor, p: Tensor, w: Tensor) -> Tensor:
        return bradley_terry_loss(
            c, r, beta=1.3, label_smoothing=0.1, margin=m, label=p, weight=w, center_rewards=0.2, reward_l2=0.3
        )

    inputs = (chosen, rejected, margin, label, weight)
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_bfloat16_rewards_are_computed_in_float32_also_under_autocast():
    chosen, rejected = (side.to(torch.bfloat16) for side in pairs())
    expected = bradley_terry_loss(chosen.float(), rejected.float())
    assert expected.dtype == torch.float32
    assert torch.equal(bradley_terry_loss(chosen, rejected), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bradley_terry_loss(chosen, rejected), expected)


def test_matches_a_linear_model_fitted_to_its_optimum():
    # The logistic Hessian of the mean loss in the weights is X' diag(p (1 - p)) X / N.
    features = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weights = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return bradley_terry_loss(features @ w, torch.zeros(20, dtype=torch.float64))

    p = torch.sigmoid(features @ weights)
    expected = features.T @ ((p * (1 - p)).unsqueeze(1) * features) / 20
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, weights), expected)


@pytest.mark.parametrize("num_pairs", [1, 2, 3])
@pytest.mark.parametrize("name", ["rejected", "margin", "label", "weight"])
def test_a_trailing_axis_is_an_error_and_never_broadcast(production: ModuleType, name: str, num_pairs: int):
    tensors = {"rejected": torch.zeros(num_pairs)} | {name: torch.zeros(num_pairs, 1)}
    with pytest.raises(ValueError, match=rf"{name} must have the shape of chosen, \({num_pairs},\), got"):
        production.bradley_terry_loss(torch.zeros(num_pairs), **tensors)


@pytest.mark.parametrize("shape", [(), (3, 1), (1, 3)])
def test_rewards_that_are_not_one_axis_are_an_error(production: ModuleType, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"chosen must have shape \(pairs,\)"):
        production.bradley_terry_loss(torch.zeros(shape), torch.zeros(shape))


def test_the_tests_import_hook_refuses_wrong_shapes():
    with pytest.raises(TypeError):
        bradley_terry_loss(torch.zeros(3), torch.zeros(3, 1))


def test_impossible_arguments_are_named():
    zeros = torch.zeros(2)
    bad = {"beta": 0.0, "label_smoothing": 0.5, "center_rewards": -1.0, "reward_l2": math.nan}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            bradley_terry_loss(zeros, zeros, **{name: value})
    with pytest.raises(ValueError, match="at least one pair"):
        bradley_terry_loss(torch.zeros(0), torch.zeros(0))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiles_whole_with_dynamic_shapes_and_the_same_result(production: ModuleType):
    def loss(chosen: Tensor, rejected: Tensor, margin: Tensor, weight: Tensor) -> Tensor:
        return production.bradley_terry_loss(
            chosen, rejected, margin=margin, weight=weight, label_smoothing=0.1, center_rewards=0.01
        )

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(loss, dynamic=True, fullgraph=True)
    for num_pairs in (5, 8, 13):
        tensors = (*pairs(num_pairs), uniform(num_pairs), uniform(num_pairs, 2))
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        results = [torch.autograd.grad(function(*inputs), inputs[:2]) for function in (compiled, loss)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
