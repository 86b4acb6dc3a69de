"""The scalar head: float32 whatever surrounds it, the same state, and a start at chance."""

from __future__ import annotations

import math

import pytest
import torch

from rm_optimizer.core.classifier.head import head_name, initialize_head, install_reward_head
from rm_optimizer.core.classifier.pooling import RewardHead
from rm_optimizer.errors import CheckpointError
from tests.builders import ENCODERS, FAMILIES, fresh_reward_model, tiny_model


# transformers' DeBERTa calls torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2", *ENCODERS])
def test_installing_keeps_the_state_and_the_logits(family: str):
    model = tiny_model(family)
    ids = torch.arange(5, 20).reshape(3, 5)
    with torch.no_grad():
        before, state = model(ids).logits, {name: value.clone() for name, value in model.state_dict().items()}
        head = install_reward_head(model)
        assert model.get_submodule(head_name(model)) is head
        assert torch.equal(model(ids).logits, before)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_installing_twice_changes_nothing():
    model = tiny_model("llama")
    assert install_reward_head(model) is install_reward_head(model)


def test_a_model_without_a_single_scalar_head_is_refused():
    model = tiny_model("llama")
    model.score = torch.nn.Linear(32, 2)
    with pytest.raises(CheckpointError, match="num_labels=1"):
        install_reward_head(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_model_leaves_the_head_in_float32_bit_for_bit(dtype: torch.dtype):
    model = tiny_model("llama")
    weight = install_reward_head(model).weight.detach().clone()
    model.to(dtype)
    assert model.base_model.embed_tokens.weight.dtype is dtype
    assert torch.equal(model.score.weight, weight)
    assert model.double().score.weight.dtype is torch.float64


def test_a_half_checkpoint_gets_a_float32_head():
    model = tiny_model("llama").bfloat16()
    model.score.weight.requires_grad_(False)
    head = install_reward_head(model)
    assert head.weight.dtype is torch.float32
    assert not head.weight.requires_grad


def test_the_head_computes_in_float32_under_autocast():
    head = RewardHead(64, 1)
    hidden = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.nn.functional.linear(hidden.float(), head.weight, head.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rewards = head(hidden)
    assert rewards.dtype is torch.float32
    assert torch.equal(rewards, expected)
    assert not torch.equal(rewards.bfloat16().float(), rewards)


def test_a_fresh_head_has_the_stated_spread_and_repeats_with_its_seed():
    head, again, other = RewardHead(4096, 1), RewardHead(4096, 1), RewardHead(4096, 1)
    said = initialize_head(head, seed=7)
    initialize_head(again, seed=7)
    initialize_head(other, seed=8)
    assert "1/(hidden+1)" in said
    assert "seed=7" in said
    assert head.bias.item() == 0
    assert torch.equal(head.weight, again.weight)
    assert not torch.equal(head.weight, other.weight)
    # The standard deviation of 4096 draws has a relative standard error of 1 / sqrt(2 * 4096) = 1.1 %; four of them.
    assert float(head.weight.detach().std()) * 4097 == pytest.approx(1, abs=0.045)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_of_a_fresh_head_is_log_2_within_5_percent(family: str, seed: int):
    model = fresh_reward_model(family, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 300, (64, 12), generator=generator)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        loss = model.compute_loss(ids[:32], mask[:32], ids[32:], mask[32:])
    assert float(loss) == pytest.approx(math.log(2), rel=0.05)
    assert float(loss) != math.log(2)
