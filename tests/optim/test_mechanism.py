"""The first step of each optimizer is its own, and that of another under its name is refused."""

from __future__ import annotations

import pytest
import torch

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import OPTIMIZERS, build_optimizer, set_train_mode
from rm_optimizer.optim.mechanism import RULES, check_mechanism, mechanism_state

BUILT_IN = sorted(RULES)


def first_step(toy, preset, head, name, **options):
    """An optimizer of a toy model after one step, with its starting point."""
    model = toy()
    optimizer = build_optimizer(model, preset(name, **options), head_names=head)
    set_train_mode(optimizer, True)
    generator = torch.Generator().manual_seed(1)

    def closure():
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * 0.1
        return 0.0

    before = mechanism_state(optimizer)
    optimizer.step(closure)
    return optimizer, before


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_first_step_of_each_optimizer_is_its_own(toy, preset, head, name, weight_decay):
    optimizer, before = first_step(toy, preset, head, name, weight_decay=weight_decay)
    check_mechanism(optimizer, name, before, passes=OPTIMIZERS[name].passes_per_step)


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_muon_is_recognized_in_both_scalings(toy, preset, head, scaling):
    optimizer, before = first_step(toy, preset, head, "muon", scaling=scaling)
    check_mechanism(optimizer, "muon", before, passes=1)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("sam", "schedulefree", "adam")])
def test_the_step_of_another_optimizer_is_refused(toy, preset, head, name):
    other = "sgd" if name != "sgd" else "adamw"
    optimizer, before = first_step(toy, preset, head, other)
    for group in optimizer.param_groups:
        group |= {"algorithm": name, "eps": 1e-8, "momentum": 0.9, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    with pytest.raises(ConfigError, match=rf"optimizer={name} did not take its own first step on the group"):
        check_mechanism(optimizer, name, before, passes=1)


def test_an_update_that_is_not_orthogonal_is_not_muon_s(toy, preset, head):
    optimizer, before = first_step(toy, preset, head, "adamw")
    for group in optimizer.param_groups:
        group |= {"algorithm": "muon", "adjust_lr_fn": "match_rms_adamw"}
    with pytest.raises(ConfigError, match=r"the step is not orthogonal|its parameters are not matrices"):
        check_mechanism(optimizer, "muon", before, passes=1)


def test_sam_of_one_pass_is_refused(toy, preset, head):
    optimizer, before = first_step(toy, preset, head, "sam")
    with pytest.raises(ConfigError, match="optimizer=sam must compute 2 passes in a step, got 1"):
        check_mechanism(optimizer, "sam", before, passes=1)


def test_a_step_without_gradients_is_refused(toy, preset, head):
    optimizer, before = first_step(toy, preset, head, "adamw")
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="optimizer=adamw had no gradient in its first step"):
        check_mechanism(optimizer, "adamw", before, passes=1)
