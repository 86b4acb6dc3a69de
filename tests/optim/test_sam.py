"""Sharpness-aware minimization in two passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rm_optimizer.optim.algorithms import SAM


def quadratic(w, curvature=1.0):
    def closure():
        w.grad = None
        loss = 0.5 * curvature * w.square().sum()
        loss.backward()
        return loss.item()

    return closure


def test_the_step_uses_the_gradient_on_the_ball_around_the_weights():
    w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    loss = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5).step(quadratic(w))
    start = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(w.detach(), start - 0.1 * (start + 0.5 * start / 5))
    assert loss == 12.5


def test_weights_return_bit_for_bit_before_the_step():
    w = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    before = w.detach().clone()
    SAM(torch.optim.SGD([w], lr=0.0), rho=1e3).step(quadratic(w))
    assert torch.equal(before, w)


def test_the_ascent_does_not_depend_on_the_length_of_the_gradient():
    """So it makes no difference whether the closure clips."""
    ends = []
    for curvature in (1.0, 1e-3):
        w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        SAM(torch.optim.SGD([w], lr=0.1 / curvature), rho=0.5).step(quadratic(w, curvature))
        ends.append(w.detach())
    torch.testing.assert_close(*ends)


def test_asam_does_not_depend_on_the_scale_of_a_weight():
    """f(w) = g(s w) with w / s: the ascent of s w must be the same (Kwon et al., 2021, Definition 2)."""
    points = []
    for s in (1.0, 10.0):
        w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64) / s)
        seen = []

        def closure(w=w, s=s, seen=seen):
            w.grad = None
            seen.append(s * w.detach().clone())
            loss = (s * w).pow(4).sum()
            loss.backward()
            return loss.item()

        SAM(torch.optim.SGD([w], lr=0.1), rho=0.5, adaptive=True).step(closure)
        points.append(seen[1])
    torch.testing.assert_close(*points)


def test_both_passes_see_the_same_dropout_and_the_stream_ends_after_one():
    w, masks = nn.Parameter(torch.ones(64)), []

    def closure():
        w.grad = None
        mask = torch.nn.functional.dropout(torch.ones(64), 0.5)
        masks.append(mask)
        loss = (w * mask).square().sum()
        loss.backward()
        return loss.item()

    torch.manual_seed(7)
    SAM(torch.optim.SGD([w], lr=0.1), rho=0.05).step(closure)
    after = torch.rand(3)
    torch.manual_seed(7)
    torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(after, torch.rand(3))


def test_step_without_closure_is_refused():
    with pytest.raises(ValueError, match=r"SAM needs step\(closure\)"):
        SAM(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), rho=0.05).step()
