"""Muon behind one optimizer object."""

from __future__ import annotations

import pytest
import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import build_optimizer, build_schedule
from rm_optimizer.schema.optimizers import ScheduleConfig, ScheduleName


def give_gradients(model, scale=1.0):
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)


def one_step(model, config, head, scale=1.0):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, config, head_names=head)
    give_gradients(model, scale)
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def test_hidden_updates_are_orthogonal(toy, preset, head):
    config = preset("muon", weight_decay=0)
    step = one_step(toy(), config, head)["model.layers.1.dense.weight"]
    singular = torch.linalg.svdvals(step / (config.lr * 0.2 * 32**0.5))
    # Five quintic steps with Jordan's coefficients end in about [0.7, 1.2]; the smallest of 32 may lag.
    assert singular.max() < 1.3
    assert singular.quantile(0.1) > 0.6


def test_hidden_updates_do_not_depend_on_the_gradients_length(toy, preset, head):
    config = preset("muon", weight_decay=0)
    one, other = (one_step(toy(), config, head, scale)["model.layers.0.dense.weight"] for scale in (1.0, 2.0**-10))
    # Newton-Schulz runs in bfloat16, 8 bits of mantissa.
    assert (one - other).norm() < 2**-6 * one.norm()


def test_hidden_updates_have_the_size_of_adamws(toy, preset, head):
    muon = one_step(toy(), preset("muon", weight_decay=0, lr=1e-3), head)["model.layers.0.dense.weight"]
    assert muon.square().mean().sqrt().item() == pytest.approx(0.185e-3, rel=0.15)


def test_the_original_scaling_is_smaller_by_the_ratio_of_the_rules(toy, preset, head):
    one, other = (
        one_step(toy(), preset("muon", weight_decay=0, scaling=scaling), head)["model.layers.0.dense.weight"]
        for scaling in ("match_rms_adamw", "original")
    )
    torch.testing.assert_close(one, other * 0.2 * 32**0.5, rtol=1e-3, atol=1e-7)


def test_a_schedule_moves_both_halves(toy, preset, head):
    optimizer = build_optimizer(toy(), preset("muon"), head_names=head)
    build_schedule(optimizer, ScheduleConfig(name=ScheduleName.linear, warmup_steps=3), 10)
    config = preset("muon")
    assert {group["lr"] for group in optimizer.parts[0].param_groups} == {config.lr / 4}
    assert {group["lr"] for group in optimizer.parts[1].param_groups} == {config.adamw_lr / 4}


def test_reloading_reaches_both_halves(toy, preset, head):
    model = toy()
    optimizer = build_optimizer(model, preset("muon"), head_names=head)
    give_gradients(model)
    optimizer.step()
    other = build_optimizer(model, preset("muon", lr=1.0), head_names=head)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(other.parts, optimizer.parts, strict=True):
        assert mine.param_groups == theirs.param_groups
        assert mine.state is other.state
    weight = model.model.layers[0].dense.weight
    assert torch.equal(other.parts[0].state[weight]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])


def test_clipping_sees_every_parameter(toy, preset, head):
    model = toy()
    optimizer = build_optimizer(model, preset("muon"), head_names=head)
    give_gradients(model)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert torch.nn.utils.get_total_norm([p.grad for p in grouped]) == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    )


def test_groups_cannot_be_added_later(toy, preset, head):
    optimizer = build_optimizer(toy(), preset("muon"), head_names=head)
    with pytest.raises(ValueError, match="groups of a CompositeOptimizer are fixed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_a_model_without_hidden_matrices_is_refused(toy, preset, head):
    model = toy()
    model.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="found no trainable hidden matrix, so it would be AdamW"):
        build_optimizer(model, preset("muon"), head_names=head)


def test_only_hidden_matrices_train_with_an_optimizer_of_one_half(toy, preset, head):
    model = toy()
    model.requires_grad_(False)
    model.model.layers[0].dense.weight.requires_grad_(True)
    optimizer = build_optimizer(model, preset("muon"), head_names=head)
    assert [type(part).__name__ for part in optimizer.parts] == ["Muon"]
