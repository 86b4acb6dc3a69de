from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.serving.embedded.budget import BUDGETS, calibrated_budget
from rm_optimizer.serving.embedded.passes import Passes, reuse_obstacle
from rm_optimizer.serving.weights.packed_linear import PackedLinear, install_packed_linears, packing_gain
from tests.core.tiny_models import DECODERS, decoder_tokenizer, encoder_tokenizer, tiny_model, tiny_tokenizer

TOLERANCE = 1e-5  # float32, other order of summation, rewards of size 1


def model_of(family, **fields):
    tokenizer = tiny_tokenizer(family)
    return BradleyTerryRM(tiny_model(family, tokenizer, **fields), tokenizer, max_length=128)


def sequences(seed=0, size=300):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(5, size, 60)
    branches = [np.concatenate([prompt, rng.integers(5, size, n)]) for n in (5, 20, 9, 3, 20)]
    alone = [rng.integers(5, size, n) for n in (1, 2, 50)]
    return [ids.astype(np.int32) for ids in (*branches, *alone, branches[0])]


def one_by_one(model, rows):
    with torch.inference_mode():
        ids = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
        return np.array([float(model(row, torch.ones_like(row))) for row in ids])


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("token_budget", [1, 64, 4096])
def test_shared_starts_give_the_rewards_of_sequences_apart(family, token_budget):
    model, rows = model_of(family), sequences()
    assert reuse_obstacle(model) is None
    shared = Passes(model, token_budget, shares=True).rewards(rows)
    np.testing.assert_allclose(shared, one_by_one(model, rows), atol=TOLERANCE)


def test_an_encoder_is_scored_without_sharing():
    model, rows = model_of("bert"), sequences()
    assert "no causal decoder" in reuse_obstacle(model)
    np.testing.assert_allclose(Passes(model, 256, shares=False).rewards(rows), one_by_one(model, rows), atol=TOLERANCE)


def test_a_window_shorter_than_the_longest_sequence_stands_against_the_cache():
    assert "sliding window" in reuse_obstacle(model_of("mistral", sliding_window=64))


def test_a_sequence_that_is_not_finite_leaves_those_in_its_pass_alone():
    model, rows = model_of("llama"), sequences()
    expected = one_by_one(model, rows)
    rows[1] = np.append(rows[1], np.int32(310))
    with torch.no_grad():
        model.model.get_input_embeddings().weight[310] = torch.inf
    rewards = Passes(model, 4096, shares=True).rewards(rows)
    assert not np.isfinite(rewards[1])
    np.testing.assert_allclose(np.delete(rewards, 1), np.delete(expected, 1), atol=TOLERANCE)


def test_equal_sequences_have_one_reward():
    rewards = Passes(model_of("llama"), 256, shares=True).rewards(sequences())
    assert rewards[0] == rewards[-1]


def test_pad_equal_to_eos_does_not_move_the_place_that_is_read():
    tokenizer = decoder_tokenizer(pad="</s>")
    plain = tiny_model("llama", tokenizer)
    model = BradleyTerryRM(plain, tokenizer, max_length=128)
    eos = tokenizer.eos_token_id
    rows = [np.array([*row, eos], np.int32) for row in ([7, 8, 9], [7, 8], [10] * 40)]
    alone = one_by_one(model, rows)
    np.testing.assert_allclose(Passes(model, 4096, shares=True).rewards(rows), alone, atol=TOLERANCE)
    without = one_by_one(model, [row[:-1] for row in rows])
    assert np.abs(alone - without).min() > 1e-3  # the EOS is read, not the token before it


@pytest.mark.skipif(
    packing_gain(torch.nn.Linear(64, 64)) == 0.0, reason="this build of PyTorch packs no float32 layers"
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_packed_layers_give_the_same_rewards_and_the_same_state(family):
    model, rows = model_of(family), sequences()
    before, state = one_by_one(model, rows), {key: value.clone() for key, value in model.state_dict().items()}
    assert install_packed_linears(model.model, least_gain=1e-9)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    np.testing.assert_allclose(one_by_one(model, rows), before, atol=1e-4)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_layers_that_gain_nothing_stay_plain():
    model = BradleyTerryRM(tiny_model("bert", encoder_tokenizer()), encoder_tokenizer(), max_length=128)
    assert not install_packed_linears(model.model, least_gain=1e9)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_the_measured_budget_is_one_of_those_tried_and_keeps_to_its_time():
    model, started = model_of("llama"), time.perf_counter()
    assert calibrated_budget(model, seconds=0.2) in BUDGETS
    assert time.perf_counter() - started < 10.0  # the largest pass may overrun; the machine may be busy
