"""The pad token never ends a sequence, costs no embedding row, and plain `transformers` then pools where we do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.padding import PadChoice, choose_pad_token, set_pad_token_id
from rm_optimizer.errors import CheckpointError
from tests.builders import decoder_tokenizer, encoder_tokenizer, tiny_model, tiny_reward_model

TEXTS = ("Hi", "The quick brown fox jumps over the lazy dog.", "</s> in </s> the text")


def test_an_own_pad_token_that_ends_nothing_is_kept():
    tokenizer = decoder_tokenizer()
    assert choose_pad_token(tokenizer, len(tokenizer)) == PadChoice("<pad>", 2, "the tokenizer's own pad token")
    tokenizer = encoder_tokenizer()
    assert choose_pad_token(tokenizer, len(tokenizer)).token == "[PAD]"


def test_a_token_that_the_vocabulary_reserves_comes_first():
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    choice = choose_pad_token(tokenizer, len(tokenizer) + 10)
    assert (choice.token, choice.token_id) == ("<|finetune_right_pad_id|>", len(tokenizer) - 1)
    assert tokenizer.pad_token_id == choice.token_id


def test_the_unknown_token_serves_when_it_is_not_eos():
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    assert choose_pad_token(tokenizer, len(tokenizer) + 10).token == "<unk>"
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.unk_token = "</s>"
    assert choose_pad_token(tokenizer, len(tokenizer) + 10).token == "<|pad|>"


def test_an_unused_embedding_row_gets_a_new_token():
    tokenizer = decoder_tokenizer(pad="</s>")
    size = len(tokenizer)
    choice = choose_pad_token(tokenizer, size + 1)
    assert (choice.token, choice.token_id) == ("<|pad|>", size)
    assert "ends sequences" in choice.reason
    assert "unused row" in choice.reason


def test_without_any_spare_token_the_highest_ordinary_one_serves_and_texts_keep_their_tokens(tmp_path: Path):
    tokenizer = decoder_tokenizer(pad="</s>")
    size = len(tokenizer)
    before = [tokenizer(text).input_ids for text in TEXTS]
    choice = choose_pad_token(tokenizer, size)
    assert len(tokenizer) == size
    assert choice.token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert "highest ordinary" in choice.reason
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert [reloaded(text).input_ids for text in TEXTS] == before
    assert reloaded(choice.token.replace("Ġ", " ")).input_ids == [choice.token_id]
    assert reloaded.pad_token_id == choice.token_id


def test_a_pad_token_that_ends_rendered_sequences_is_replaced():
    tokenizer = decoder_tokenizer()
    choice = choose_pad_token(tokenizer, len(tokenizer) + 1, last_ids=[tokenizer.pad_token_id])
    assert choice.token == "<|pad|>"


def test_a_foreign_tokenizer_is_refused():
    tokenizer = decoder_tokenizer()
    with pytest.raises(CheckpointError, match="at most as many tokens as the embedding's 50 rows"):
        choose_pad_token(tokenizer, 50)


def test_without_eos_no_token_that_text_can_hold_pads():
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    tokenizer.eos_token = None
    choice = choose_pad_token(tokenizer, len(tokenizer) + 1, ends_freely=True)
    assert choice.token == "<|pad|>"
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="neither EOS nor a pad token"):
        tiny_reward_model("llama", tokenizer, max_length=32)
    model = tiny_reward_model("llama", tokenizer, max_length=32, spare_rows=1)
    assert model.pad_choice.token == "<|pad|>"


def test_nested_configurations_get_the_pad_id_too():
    model = tiny_model("llama", decoder_tokenizer())
    model.config.text_config = type(model.config)()
    set_pad_token_id(model, 9)
    assert model.config.pad_token_id == model.config.text_config.pad_token_id == 9


def test_eos_embedding_is_trained_when_the_model_was_built_with_pad_equal_to_eos():
    tokenizer = decoder_tokenizer(pad="</s>")
    plain = tiny_model("llama", tokenizer)
    assert plain.get_input_embeddings().padding_idx == tokenizer.eos_token_id
    model = BradleyTerryRM(plain, tokenizer=tokenizer, max_length=64)
    model(**model.tokenize(["Hi", "a longer prompt"], ["Hello.", "b"])).sum().backward()
    gradient = model.model.get_input_embeddings().weight.grad
    assert gradient[tokenizer.eos_token_id].abs().sum() > 0
    assert gradient[model.pad_choice.token_id].abs().sum() == 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad", ["</s>", None])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_plain_reload_of_a_pad_equals_eos_model_scores_alike_on_either_side(
    family: str, pad: str | None, side: str, tmp_path: Path
):
    tokenizer = decoder_tokenizer(pad=pad)
    rows = len(tokenizer)
    reward_model = tiny_reward_model(family, tokenizer, max_length=64)
    assert reward_model.model.get_input_embeddings().weight.shape[0] == rows
    reward_model.save_pretrained(tmp_path / "export")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    plain_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    encodings = [list(reward_model.renderer.encode("a question", text).ids) for text in TEXTS]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in encodings)
    batch = plain_tokenizer.pad({"input_ids": encodings}, padding_side=side, return_tensors="pt")
    with torch.no_grad():
        theirs = plain(**batch).logits[:, 0]
        ours = reward_model(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(theirs, reward_model.score(["a question"] * 3, TEXTS), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
