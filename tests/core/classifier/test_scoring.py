from __future__ import annotations

import numpy as np
import pytest
import torch

from rm_optimizer.core.classifier.pooling import computes_columns_alone
from rm_optimizer.core.classifier.scoring import KEPT_BYTES, PromptCache, SequenceScorer, reuse_obstacle
from rm_optimizer.core.model.features import features
from rm_optimizer.core.tokens.prefix_trees import TREE_TOKENS
from tests.builders import DECODERS, FAMILIES, decoder_tokenizer, tiny_reward_model

TOLERANCE = 1e-5  # float32, other order of summation, rewards of size 1


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
    model, rows = tiny_reward_model(family), sequences()
    assert reuse_obstacle(model) is None
    shared = SequenceScorer(model, token_budget).rewards(rows)
    np.testing.assert_allclose(shared, one_by_one(model, rows), atol=TOLERANCE)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_last_layer_computes_the_pooled_tokens_alone(family, attention, monkeypatch):
    model, rows = tiny_reward_model(family), sequences()
    model.model.set_attn_implementation(attention)
    with torch.no_grad():  # no inference mode: every layer computes every token
        ids = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
        expected = [float(model(row, torch.ones_like(row))) for row in ids]
    layers = model.model.base_model.layers if hasattr(model.model.base_model, "layers") else []
    seen = []
    for layer in layers:  # no hook, which would read every token

        def watched(states, *given, layer=layer, forward=layer.mlp.forward):
            seen.append((layer, states.shape[:2].numel()))
            return forward(states, *given)

        monkeypatch.setattr(layer.mlp, "forward", watched)
    for budget in (1, 64, 4096):
        np.testing.assert_allclose(SequenceScorer(model, budget).rewards(rows), expected, atol=TOLERANCE)
    if layers:
        tokens = [sum(count for each, count in seen if each is layer) for layer in layers]
        assert tokens[-1] < tokens[0] / 4


@pytest.mark.parametrize("place", ["", "layers.1", "layers.1.mlp", "layers.1.self_attn.o_proj", "norm"])
def test_hooks_from_the_last_layer_on_read_every_token(place):
    model, rows, seen = tiny_reward_model("llama"), sequences(), []
    module = model.model.base_model.get_submodule(place)
    scorer = SequenceScorer(model, 64)
    with torch.inference_mode():
        expected = scorer.padded(rows)
        with module.register_forward_hook(lambda _, args, output: seen.append(output)):
            assert not computes_columns_alone(model.model)
            torch.testing.assert_close(scorer.padded(rows), expected, rtol=0, atol=TOLERANCE)
        assert computes_columns_alone(model.model)
        if place:  # the backbone's own inputs are whole in any case
            with module.register_forward_pre_hook(lambda _, args: None):
                assert not computes_columns_alone(model.model)
    states = getattr(seen[0], "last_hidden_state", seen[0])
    assert states.shape[:2] == (len(rows), max(map(len, rows)))


@pytest.mark.parametrize("race", ["options", "hook"])
def test_a_hook_that_another_thread_removes_changes_no_reward(race, monkeypatch):
    """Torch copies the hooks of a module and then looks up which take options; ids of two threads' hooks may be one."""
    model, rows = tiny_reward_model("llama"), sequences()
    layer, removed = model.model.base_model.layers[-1], []

    def remove(*_):
        removed.append(layer._forward_pre_hooks_with_kwargs.clear())
        if race == "hook":
            layer._forward_pre_hooks.clear()

    with torch.inference_mode():
        expected = SequenceScorer(model, 64).padded(rows)
        model.model.base_model.layers[0].register_forward_hook(remove)
        torch.testing.assert_close(SequenceScorer(model, 64).padded(rows), expected, rtol=0, atol=TOLERANCE)
    assert removed


@pytest.mark.parametrize("broken", ["mixes tokens", "keeps no keys"])
def test_a_last_layer_that_would_compute_otherwise_computes_every_token(broken, monkeypatch):
    model, rows = tiny_reward_model("llama"), sequences()
    layer = model.model.base_model.layers[-1]
    part = layer.mlp if broken == "mixes tokens" else layer

    def changed(states, forward=part.forward, **options):
        if broken == "mixes tokens":
            return forward(states) + states.cumsum(dim=1)
        return forward(states, **options | {"past_key_values": None})

    monkeypatch.setattr(part, "forward", changed)
    with torch.no_grad():
        ids = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
        expected = [float(model(row, torch.ones_like(row))) for row in ids]
    with torch.inference_mode():
        np.testing.assert_allclose(SequenceScorer(model, 1).padded(rows), expected, atol=TOLERANCE)
        assert not computes_columns_alone(model.model)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("most_bytes", [KEPT_BYTES, 0])
def test_starts_that_are_kept_from_call_to_call_change_no_reward(family, most_bytes):
    model, rng = tiny_reward_model(family), np.random.default_rng(0)
    system = rng.integers(5, 300, 40)
    prompts = [np.concatenate([system, rng.integers(5, 300, 80)]) for _ in range(2)]
    rows = [np.concatenate([p, rng.integers(5, 300, n)]).astype(np.int32) for n in (1, 9, 30, 4) for p in prompts]
    rows += [rows[0], rows[3][:36], rng.integers(5, 300, 7).astype(np.int32), rows[0][:1]]
    calls = [[11], [0], [1], [2], [3, 8], [4, 5], [6, 2, 4], [7], [0], [9], [10], [11]]
    expected, seen, cache = one_by_one(model, rows), [], PromptCache(most_bytes)
    model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scorer = SequenceScorer(model, 4096, prompts=cache)
    for places in calls:
        found = scorer.rewards([rows[i] for i in places])
        np.testing.assert_allclose(found, expected[places], atol=TOLERANCE)
    tokens = sum(len(rows[i]) for places in calls for i in places)
    assert (sum(seen) < 0.75 * tokens) == (most_bytes > 0)
    assert len(cache._kept) == 3 * (most_bytes > 0)  # the common start of both prompts, and each of them


def test_an_encoder_is_scored_without_sharing():
    model, rows = tiny_reward_model("bert"), sequences()
    assert "not a causal decoder" in reuse_obstacle(model)
    np.testing.assert_allclose(SequenceScorer(model, 256).rewards(rows), one_by_one(model, rows), atol=TOLERANCE)


@pytest.mark.parametrize("token_budget", [64, 4096])
def test_a_window_shorter_than_the_longest_sequence_stands_against_the_cache_alone(token_budget):
    model, rows = tiny_reward_model("mistral", sliding_window=64), sequences()
    assert "sliding window" in reuse_obstacle(model)
    scorer = SequenceScorer(model, token_budget)
    assert scorer.shares
    np.testing.assert_allclose(scorer.rewards(rows), one_by_one(model, rows), atol=TOLERANCE)


def test_the_order_changes_no_reward():
    model, rows = tiny_reward_model("llama"), sequences()
    expected = SequenceScorer(model, 256).rewards(rows)
    np.testing.assert_array_equal(SequenceScorer(model, 256).rewards(rows[::-1])[::-1], expected)


@pytest.mark.parametrize(("num_responses", "token_budget"), [(3, 4096), (12, 4096), (60, 4096), (60, 512), (300, 4096)])
def test_a_prompt_of_a_group_is_computed_once_or_as_often_as_pays(num_responses, token_budget):
    model, rng = tiny_reward_model("llama", max_position_embeddings=1024), np.random.default_rng(0)
    prompt = rng.integers(5, 300, 300)
    rows = [np.concatenate([prompt, rng.integers(5, 300, 40)]).astype(np.int32) for _ in range(num_responses)]
    seen = []
    backbone = model.model.base_model
    hook = backbone.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rewards = SequenceScorer(model, token_budget).rewards(rows)
    hook.remove()
    assert sum(seen) <= 300 + 40 * num_responses + 2 * TREE_TOKENS  # starts computed again, and the last row's padding
    assert max(seen) <= token_budget
    np.testing.assert_allclose(rewards[:3], one_by_one(model, rows[:3]), atol=TOLERANCE)


def test_a_sequence_that_is_not_finite_leaves_those_in_its_pass_alone():
    model, rows = tiny_reward_model("llama"), sequences()
    expected = one_by_one(model, rows)
    rows[1] = np.append(rows[1], np.int32(310))
    with torch.no_grad():
        model.model.get_input_embeddings().weight[310] = torch.inf
    rewards = SequenceScorer(model, 4096).rewards(rows)
    assert not np.isfinite(rewards[1])
    np.testing.assert_allclose(np.delete(rewards, 1), np.delete(expected, 1), atol=TOLERANCE)


def test_equal_sequences_have_one_reward():
    rewards = SequenceScorer(tiny_reward_model("llama"), 256).rewards(sequences())
    assert rewards[0] == rewards[-1]


def test_pad_equal_to_eos_does_not_move_the_place_that_is_read():
    tokenizer = decoder_tokenizer(pad="</s>")
    model = tiny_reward_model("llama", tokenizer)
    eos = tokenizer.eos_token_id
    rows = [np.array([*row, eos], np.int32) for row in ([7, 8, 9], [7, 8], [10] * 40)]
    alone = one_by_one(model, rows)
    np.testing.assert_allclose(SequenceScorer(model, 4096).rewards(rows), alone, atol=TOLERANCE)
    without = one_by_one(model, [row[:-1] for row in rows])
    assert np.abs(alone - without).min() > 1e-3  # the EOS is read, not the token before it


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_what_the_head_reads_of_each_sequence_alone(family, tmp_path):
    model, rows, seen = tiny_reward_model(family), sequences(), []
    hook = model.reward_head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0][0].view(-1, 32)[-1]))
    with torch.no_grad():
        for row in rows:
            model.model(input_ids=torch.from_numpy(row.astype(np.int64))[None])
    hook.remove()
    model.train()
    found = features(model, rows, token_budget=256)
    assert model.training
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features(model, rows[::-1], token_budget=64).flip(0), found, rtol=1e-5, atol=1e-5)
    mapped = features(model, rows, token_budget=256, file=tmp_path / "features.npy")
    assert torch.equal(mapped, found)
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), found.numpy())
    rewards = torch.from_numpy(SequenceScorer(model.eval(), 256).rewards(rows)).float()
    torch.testing.assert_close(model.reward_head(found).squeeze(-1), rewards, rtol=1e-6, atol=1e-6)
