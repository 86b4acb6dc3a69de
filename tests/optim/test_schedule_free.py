"""Training weights, evaluation weights and the way between them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from rm_optimizer.optim.algorithms import ScheduleFreeAdamW, set_train_mode


def make(beta1=0.9, size=200):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(size))
    return w, ScheduleFreeAdamW([w], lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8)


def train(w, optimizer, steps, generator=None):
    generator = generator or torch.Generator().manual_seed(1)
    for _ in range(steps):
        w.grad = torch.randn(w.shape, generator=generator)
        optimizer.step()


def test_evaluating_in_between_changes_nothing():
    ends = []
    for evaluate in (False, True):
        w, optimizer = make()
        generator = torch.Generator().manual_seed(1)
        set_train_mode(optimizer, True)
        for _ in range(10):
            train(w, optimizer, 1, generator)
            if evaluate:
                set_train_mode(optimizer, False)
                set_train_mode(optimizer, True)
        ends.append(w.detach().clone())
    assert torch.equal(*ends)


def test_evaluation_weights_are_the_mean_of_the_iterates():
    w, optimizer = make()
    set_train_mode(optimizer, True)
    generator, iterates = torch.Generator().manual_seed(1), []
    for _ in range(20):
        train(w, optimizer, 1, generator)
        iterates.append(optimizer.state[w]["z"].clone())
    set_train_mode(optimizer, False)
    # At a constant learning rate all weights are equal; float32 over 20 steps.
    torch.testing.assert_close(w.detach(), torch.stack(iterates).mean(0), rtol=0, atol=1e-5)


def test_training_weights_lie_between_iterate_and_mean():
    w, optimizer = make()
    set_train_mode(optimizer, True)
    train(w, optimizer, 10)
    y, z = w.detach().clone(), optimizer.state[w]["z"].clone()
    set_train_mode(optimizer, False)
    torch.testing.assert_close(y, 0.1 * z + 0.9 * w.detach(), rtol=0, atol=1e-5)


def test_a_checkpoint_in_evaluation_mode_reloads_to_the_training_weights():
    w, optimizer = make()
    set_train_mode(optimizer, True)
    train(w, optimizer, 10)
    y = w.detach().clone()
    set_train_mode(optimizer, False)
    saved, state = w.detach().clone(), deepcopy(optimizer.state_dict())

    other, again = make()
    with torch.no_grad():
        other.copy_(saved)
    again.load_state_dict(state)
    set_train_mode(again, True)
    assert torch.equal(other, y)
    train(other, again, 3)
    set_train_mode(optimizer, True)
    train(w, optimizer, 3)
    assert torch.equal(other, w)


def test_switching_twice_is_switching_once():
    w, optimizer = make()
    set_train_mode(optimizer, True)
    train(w, optimizer, 5)
    set_train_mode(optimizer, False)
    once = w.detach().clone()
    set_train_mode(optimizer, False)
    assert torch.equal(once, w)


def test_a_step_in_evaluation_mode_is_refused():
    w, optimizer = make()
    with pytest.raises(RuntimeError, match="evaluation mode; call set_train_mode"):
        train(w, optimizer, 1)


def test_other_optimizers_have_one_kind_of_weights():
    w = nn.Parameter(torch.ones(2))
    set_train_mode(torch.optim.SGD([w], lr=0.1), False)
    assert torch.equal(w, torch.ones(2))
