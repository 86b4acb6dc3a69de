"""Weights in bfloat16: rounding at random is right in the mean, so that small updates add up."""

from __future__ import annotations

import math

import pytest
import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import build_optimizer
from rm_optimizer.optim.algorithms import StochasticRounding, round_at_random


def test_a_number_is_rounded_to_a_neighbor_with_the_number_as_mean():
    torch.manual_seed(0)
    values, draws = torch.tensor([1.001, -1.001, 3.3e-5, -70000.0, 1.0, 0.0, math.inf]), 20_000
    rounded = round_at_random(values.expand(draws, -1)).double()
    below = torch.where(values < 0, values.abs(), values).view(torch.int32) & -(1 << 16)
    low, high = (each.view(torch.float32).double() * values.sign() for each in (below, below + (1 << 16)))
    assert ((rounded == low) | (rounded == high))[:, :-2].all()
    error = (rounded.mean(0) - values.double())[:4].abs()
    assert (error < 4 * 0.5 * (high - low).abs()[:4] / math.sqrt(draws)).all()  # of a coin, four standard errors
    assert (rounded[:, 4:] == values[4:]).all()  # numbers of bfloat16 stay


def test_what_is_no_number_stays_none():
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)  # with a carry, 0 or infinite
    assert round_at_random(patterns.view(torch.float32).expand(100, -1)).isnan().all()


def test_updates_below_the_resolution_add_up():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = StochasticRounding(torch.optim.SGD([weight], lr=1e-4))
    assert (weight - 1e-4 == 1).all()  # rounded to the nearest number, it never moves
    for _ in range(100):
        weight.grad = torch.ones(20_000)
        optimizer.step()
    spread = math.sqrt(0.01 * 2**-8 / 20_000)  # the variance of a step is at most update times resolution
    assert 1 - weight.detach().double().mean().item() == pytest.approx(0.01, abs=4 * spread)


def test_gradients_of_half_weights_are_summed_in_float32():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    StochasticRounding(torch.optim.SGD([weight], lr=1e-4))
    for factor in (1.0, 2**-10):
        (weight * factor).sum().backward()
    assert weight.grad.item() == 1 + 2**-10


def test_a_step_that_fails_leaves_the_weights_as_they_were(toy, preset, head, monkeypatch):
    model = toy(torch.bfloat16)
    optimizer = build_optimizer(model, preset("muon", nesterov="false"), head_names=head)
    before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]

    def full(*given):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.optim.Muon, "step", full)
    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    for p, *_ in before:
        p.grad = torch.ones(p.shape)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert all(p.data_ptr() == place and torch.equal(p, value) for p, place, value in before)
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for part in optimizer.base.parts for group in part.param_groups
    ]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_float16_is_not_rounded_in_silence(toy, preset, head):
    with pytest.raises(ConfigError, match="float16"):
        build_optimizer(toy(torch.float16), preset("adamw"), head_names=head)
