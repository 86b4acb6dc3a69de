"""Rewards depend on a prompt and a response alone: not on the batch, the padding, dropout or the precision around."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.classifier import attention, pooling, scoring
from rm_optimizer.core.classifier.attention import choose_attention
from rm_optimizer.core.classifier.building import disable_dropout
from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message, PreferencePair
from rm_optimizer.core.tokens.batching import PackedPairBatch, PackedPairCollator, PairBatch, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.padding import pack_trees
from rm_optimizer.errors import CheckpointError, ConfigError
from tests.builders import (
    FAMILIES,
    decoder_tokenizer,
    fresh_reward_model,
    tiny_model,
    tiny_reward_model,
)

PROMPTS = (
    "Hi",
    "What is 2 + 2?",
    (Message("user", "a"), Message("assistant", "b"), Message("user", "c")),
    "Hi",
    "x " * 60,
)
RESPONSES = ("Hello.", "4", "d", "Go away, fox!", "naïve 日本 " * 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_does_not_depend_on_what_is_scored_beside_it(family: str):
    model = tiny_reward_model(family)
    assert isinstance(model, Scorer)
    alone = torch.cat([model.score([prompt], [response]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)])
    assert alone.std() > 1e-3
    for budget in (1, 100, 250, 16384):
        torch.testing.assert_close(model.score(PROMPTS, RESPONSES, token_budget=budget), alone, rtol=1e-5, atol=1e-5)
    reverse = model.score(PROMPTS[::-1], RESPONSES[::-1]).flip(0)
    torch.testing.assert_close(reverse, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_are_one_float32_for_each_sequence_also_under_autocast_and_in_half_weights(family: str):
    model = tiny_reward_model(family)
    batch = model.tokenize(PROMPTS, RESPONSES)
    for rewards in (model(**batch), model.score(PROMPTS, RESPONSES), model.score([], [])):
        assert rewards.dtype is torch.float32
        assert rewards.shape in ((5,), (0,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**batch).detach()
    half = model.bfloat16()(**batch).detach()
    for rewards in (mixed, half):
        assert rewards.dtype is torch.float32
        assert not torch.equal(rewards.bfloat16().float(), rewards), "rewards were rounded to bfloat16"
    assert model.double()(**batch).dtype is torch.float64


def test_score_restores_the_mode_and_gives_tensors_that_can_be_trained_on():
    model = tiny_reward_model("llama")
    for mode in (True, False):
        model.train(mode)
        rewards = model.score(["Hi"], ["Hello."])
        assert model.training is model.model.training is mode
        assert not rewards.is_inference()
        assert not rewards.requires_grad


BEST_OF = tuple(f"{word} " * (3 * k + 1) for k, word in enumerate(("yes", "no", "Paris", "seven", "fox", "dog", "yes")))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_responses_to_a_prompt_score_as_each_alone(family: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_reward_model(family)
    prompts = [PROMPTS[1], PROMPTS[4], (Message("user", PROMPTS[1]),), "Hi"] * 4
    responses = [BEST_OF[k % 7] for k in range(16)]
    alone = torch.cat([model.score([prompt], [response]) for prompt, response in zip(prompts, responses, strict=True)])
    packed = []
    monkeypatch.setattr(
        scoring, "pack_trees", lambda trees, **options: packed.append(trees) or pack_trees(trees, **options)
    )
    for budget in (1, 100, 250, 16384):
        rewards = model.score(prompts, responses, token_budget=budget)
        torch.testing.assert_close(rewards, alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.score(prompts[::-1], responses[::-1], token_budget=budget).flip(0), rewards)
    assert bool(packed) is (family != "bert")


def pair_batches(model: BradleyTerryRM, folder: Path) -> tuple[PairBatch, PackedPairBatch]:
    pairs = [PreferencePair("What is 2 + 2? " * k, BEST_OF[k], BEST_OF[k - 1]) for k in range(1, 6)]
    tokenized = tokenize_pairs(pairs, model.renderer, folder)
    pad = model.renderer.pad_token_id
    return PairCollator(tokenized, pairs, pad)(range(5)), PackedPairCollator(tokenized, pairs, pad)(range(5))


@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_rewards_of_both_kinds_of_batch_agree_whatever_the_pad_token(pad: str | None, tmp_path: Path):
    tokenizer = decoder_tokenizer(pad)
    model = BradleyTerryRM(tiny_model("llama"), tokenizer=tokenizer, max_length=96)
    plain, packed = pair_batches(model, tmp_path)
    rewards = model.rewards_of(packed)
    assert rewards.dtype is torch.float32
    assert rewards.shape == (10,)
    torch.testing.assert_close(rewards, model.rewards_of(plain), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.rewards_of(plain), model(plain.input_ids, plain.attention_mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.rewards_of(packed).detach()
    assert mixed.dtype is torch.float32
    assert not torch.equal(mixed.bfloat16().float(), mixed), "rewards were rounded to bfloat16"


def test_prefix_parity_is_rounding_where_sharing_is_exact_and_large_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    model = tiny_reward_model("llama").train()
    pairs = [model.renderer.encode("What is it?", response).ids for response in ("An egg.", "A fox, a dog.")]
    groups = [[np.array(ids, dtype=np.int32) for ids in pairs]]
    assert 0 <= model.prefix_parity(groups) < 1e-5
    assert model.training
    monkeypatch.setattr(pooling, "attention_masks", lambda *_: None)
    assert model.prefix_parity(groups) > 1e-3


def test_a_bidirectional_model_says_why_it_shares_no_prefix():
    assert tiny_reward_model("llama").supports_prefix_sharing() is None
    assert "not a causal decoder" in str(tiny_reward_model("bert").supports_prefix_sharing())


def test_groups_have_the_rewards_of_their_responses():
    model = tiny_reward_model("llama")
    several, none, one = model.score_groups(PROMPTS[:3], [RESPONSES[:3], (), RESPONSES[:1]])
    assert none.shape == (0,)
    expected = model.score([PROMPTS[0]] * 3 + [PROMPTS[2]], [*RESPONSES[:3], RESPONSES[0]])
    torch.testing.assert_close(torch.cat([several, one]), expected, rtol=1e-5, atol=1e-5)
    assert model.score_groups([], []) == []


def test_score_pair_is_the_margin():
    model = tiny_reward_model("llama")
    a, b = model.score(["Hi", "Hi"], ["Hello.", "No."]).tolist()
    assert model.score_pair("Hi", "Hello.", "No.") == pytest.approx(a - b, abs=1e-6)
    assert model.score_pair("Hi", "Hello.", "No.") == -model.score_pair("Hi", "No.", "Hello.")


def test_unequal_numbers_of_prompts_and_responses_are_refused():
    with pytest.raises(ValueError, match="got 1 prompts and 2 responses"):
        tiny_reward_model("llama").score(["Hi"], ["a", "b"])
    with pytest.raises(ValueError, match="got 2 prompts and 1 groups"):
        tiny_reward_model("llama").score_groups(["Hi", "Ho"], [["a", "b"]])


@pytest.mark.parametrize("family", FAMILIES)
def test_compute_loss_is_the_loss_of_both_sides_forwarded_apart_and_so_is_its_gradient(family: str):
    model = tiny_reward_model(family).double()
    chosen = model.tokenize(["Hi", "What is 2 + 2?"], ["Hello.", "It is 4, of course, as everyone knows."])
    rejected = model.tokenize(["Hi", "What is 2 + 2?"], ["No!", "5"])
    options = {"beta": 0.5, "label_smoothing": 0.1, "margin": torch.tensor([0.2, 0.0]), "center_rewards": 0.01}
    together = model.compute_loss(*chosen.values(), *rejected.values(), **options)
    apart = bradley_terry_loss(model(**chosen), model(**rejected), **options)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (together, apart)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def with_dropout(family: str, dropout: bool) -> BradleyTerryRM:
    fields = {"attention_dropout": 0.1} if family != "bert" else {}
    return fresh_reward_model(family, fields=fields, dropout=dropout)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_training_passes_agree_exactly_unless_dropout_is_asked_for(family: str):
    for dropout in (False, True):
        model = with_dropout(family, dropout).train()
        batch = model.tokenize(PROMPTS[:2], RESPONSES[:2])
        assert torch.equal(model(**batch), model(**batch)) is not dropout


def test_every_kind_of_dropout_field_is_set_to_zero_and_nothing_else():
    config = LlamaConfig(attention_dropout=0.3)
    config.resid_pdrop, config.layerdrop, config.hidden_dropout_prob, config.use_dropout = 0.1, 0.2, 1, True
    config.classifier_dropout = None
    config.text_config = LlamaConfig(attention_dropout=0.4)
    disable_dropout(config)
    zeroed = (config.attention_dropout, config.resid_pdrop, config.layerdrop, config.hidden_dropout_prob)
    assert zeroed == (0, 0, 0, 0)
    assert config.text_config.attention_dropout == 0
    assert config.use_dropout is True
    assert config.classifier_dropout is None
    assert config.rms_norm_eps == LlamaConfig().rms_norm_eps


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = fresh_reward_model("llama", gradient_checkpointing=checkpointing).train()
        assert model.model.is_gradient_checkpointing is checkpointing
        model(**model.tokenize(PROMPTS[:2], RESPONSES[:2])).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_seed_decides_every_weight_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [fresh_reward_model("llama", seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["model.score.weight"], other["model.score.weight"])
    assert not torch.equal(first["model.model.embed_tokens.weight"], other["model.model.embed_tokens.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_head_parameter_names_are_this_modules_and_name_the_head(family: str):
    model = tiny_reward_model(family)
    parameters = dict(model.named_parameters())
    named = [parameters[name] for name in model.head_parameter_names()]
    assert {id(parameter) for parameter in named} == {id(parameter) for parameter in model.reward_head.parameters()}


def test_unknown_architectures_and_fields_get_a_did_you_mean():
    tokenizer = decoder_tokenizer()
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        BradleyTerryRM.from_config({"model_type": "lama"}, tokenizer, max_length=64, seed=0)
    with pytest.raises(ConfigError, match=r"'hidden_size'.*; '~model\.architecture\.hiden_size' leaves out a"):
        BradleyTerryRM.from_config({"model_type": "llama", "hiden_size": 8}, tokenizer, max_length=64, seed=0)


@pytest.mark.parametrize("wrong", [{"hidden_size": 33}, {"hidden_size": "wide"}])
def test_fields_that_do_not_fit_each_other_give_one_sentence(wrong: dict[str, object]):
    with pytest.raises(ConfigError, match=r"model\.architecture does not describe a model: .*(multiple|int)") as caught:
        fresh_reward_model("llama", fields=wrong)
    assert "\n" not in str(caught.value)


def test_a_type_without_a_classifier_is_refused():
    with pytest.raises(CheckpointError, match="no sequence classifier for mamba"):
        BradleyTerryRM.from_config({"model_type": "mamba"}, decoder_tokenizer(), max_length=64, seed=0)


def test_an_encoder_decoder_is_refused():
    with pytest.raises(CheckpointError, match="encoder-decoder"):
        BradleyTerryRM.from_config({"model_type": "t5"}, decoder_tokenizer(), max_length=64, seed=0)


def test_a_length_beyond_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match=r"model\.max_length must be at most 256.*got 257"):
        fresh_reward_model("gpt2", max_length=257)
    model = fresh_reward_model("roberta", max_length=257)
    assert model.score(["long " * 400], ["text"]).isfinite().all()
    with pytest.raises(ConfigError, match="at most 257"):
        fresh_reward_model("roberta", max_length=258)


@pytest.fixture
def spoken(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    attention.say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="rm_optimizer"):
        yield caplog


def test_attention_falls_back_along_the_chain_and_says_so_once(
    spoken: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    llama = LlamaConfig(num_hidden_layers=1)
    for _ in range(2):
        assert choose_attention(llama, "flash_attention_2", torch.float32) == "sdpa"
    assert [record.levelname for record in spoken.records] == ["WARNING"]
    assert spoken.messages == ["attention uses sdpa: flash_attention_2: needs a CUDA device"]
    assert choose_attention(llama, "auto", torch.float32) == "sdpa"
    assert [record.levelname for record in spoken.records] == ["WARNING", "INFO"]
    assert choose_attention(llama, "eager", torch.float32) == "eager"


def test_a_model_without_sdpa_gets_eager(spoken: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = CONFIG_MAPPING["gpt_neo"](num_layers=2, attention_types=[[["global", "local"], 1]])
    assert choose_attention(config, "sdpa", torch.float32) == "eager"
    assert spoken.messages == ["attention uses eager: sdpa: not supported by the model"]


def test_an_unknown_attention_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'sdpa'"):
        choose_attention(LlamaConfig(), "spda", torch.float32)


def test_a_text_is_one_response_and_never_its_letters():
    model = tiny_reward_model("llama")
    assert torch.equal(model.score("hello", "world"), model.score(["hello"], ["world"])[0])
    assert torch.equal(model.score("hello", ["world", "no"]), model.score(["hello", "hello"], ["world", "no"]))
    turns = (Message("user", "hello"),)
    assert torch.equal(model.score(turns, "world"), model.score([turns], ["world"])[0])  # type: ignore[arg-type]
    assert model.tokenize("hello", "world")["input_ids"].shape[0] == 1
    with pytest.raises(ValueError, match="expected a list of responses with a list of prompts, got the text 'xy'"):
        model.score(["a", "b"], "xy")
    with pytest.raises(TypeError, match=r"responses_of_each\[0\] must be a list"):
        model.score_groups(["a", "b"], ["x", "y"])
