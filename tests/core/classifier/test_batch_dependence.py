"""Models whose rewards depend on their batch are refused before they are trained or scored with, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification, PerceiverConfig

from rm_optimizer.core.classifier import limits
from rm_optimizer.core.classifier.limits import KNOWN, default_max_length, exact_length, position_window
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import CheckpointError, ConfigError
from tests.builders import decoder_tokenizer, encoder_tokenizer, tiny_architecture

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
DEPENDENT = {
    "convbert": {**SMALL, "embedding_size": 32},
    "fnet": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    "nystromformer": SMALL,
    "yoso": SMALL,
}
"""Those of `KNOWN` that the measurement finds in random weights too."""
LONGROPE = {
    "model_type": "phi3",
    **SMALL,
    "num_key_value_heads": 4,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}


def built(model_type: str, fields: dict[str, Any], max_length: int = 64) -> BradleyTerryRM:
    tokenizer = encoder_tokenizer() if model_type not in ("llama", "phi3") else decoder_tokenizer()
    fields = {"model_type": model_type} | fields
    return BradleyTerryRM.from_config(fields, tokenizer, max_length=max_length, seed=0)


@pytest.mark.parametrize("model_type", sorted(KNOWN))
def test_a_known_architecture_is_refused_before_it_is_built(model_type: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{model_type} gives a response another reward when a longer one"):
        built(model_type, {})
    config = AutoConfig.for_model(model_type, num_labels=1)
    config.architectures = ["ForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="another reward when a longer one"):
        BradleyTerryRM.from_pretrained(tmp_path)  # whose weights are not even there


@pytest.mark.parametrize("model_type", sorted(DEPENDENT))
def test_an_unknown_architecture_is_measured(model_type: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "KNOWN", {})
    with pytest.raises(ConfigError, match="padding changes what it reads of a sequence by"):
        built(model_type, {**DEPENDENT[model_type], "initializer_range": 0.3})


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("electra", {**SMALL, "embedding_size": 32}),
        ("longformer", {**SMALL, "attention_window": [8, 8], "max_position_embeddings": 130}),
        ("llama", tiny_architecture("llama")),
        ("albert", {**SMALL, "embedding_size": 32}),
    ],
)
def test_a_model_that_keeps_to_its_mask_passes(model_type: str, fields: dict[str, Any]):
    assert built(model_type, fields).score(["a"], ["b"]).isfinite().all()


def test_longrope_is_bounded_by_its_original_length():
    config = AutoConfig.for_model(**LONGROPE, vocab_size=300, pad_token_id=0)
    assert exact_length(config) == 32
    assert default_max_length(config, decoder_tokenizer()) == 32
    built("phi3", LONGROPE, max_length=32)
    with pytest.raises(ConfigError, match=r"model\.max_length must be at most 32, to which this model.*got 33"):
        built("phi3", LONGROPE, max_length=33)


def test_bigbird_attends_to_everything_whatever_was_scored_before():
    model = built("big_bird", SMALL)
    assert model.model.config.attention_type == "original_full"


def test_a_model_without_an_embedding_of_ids_is_refused_in_one_sentence():
    config = PerceiverConfig(num_latents=4, d_latents=8, d_model=16, num_blocks=1, num_self_attends_per_block=1)
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(CheckpointError, match="no embedding of token ids"):
        BradleyTerryRM(model, tokenizer=encoder_tokenizer(), max_length=16)


@pytest.mark.parametrize(
    ("model_type", "fields", "says"),
    [
        ("xmod", {"languages": ["en_XX", "de_DE"]}, "set default_language in its config.json to one of en_XX, de_DE"),
        ("layoutlmv2", {}, "model.architecture does not describe a model: LayoutLMv2Model requires the detectron2"),
        ("layoutlmv3", {}, "LayoutLMv3ForSequenceClassification computes no rewards from token ids alone"),
        ("lilt", {}, "LiltForSequenceClassification computes no rewards from token ids alone"),
    ],
)
def test_a_model_that_cannot_compute_is_refused_in_one_sentence(model_type: str, fields: dict[str, Any], says: str):
    with pytest.raises((CheckpointError, ConfigError), match=says) as caught:
        built(model_type, SMALL | fields)
    assert "\n" not in str(caught.value)


def test_a_language_that_is_named_is_read():
    fields = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
    assert built("xmod", SMALL | fields).score(["a"], ["b"]).isfinite().all()


@pytest.mark.parametrize("model_type", ["longformer", "data2vec-text", "luke", "xlm-roberta", "ibert"])
def test_positions_counted_from_after_the_pad_id_shorten_the_window(model_type: str):
    config = AutoConfig.for_model(model_type, max_position_embeddings=130, pad_token_id=1)
    assert position_window(config) == 128


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("data2vec-text", SMALL),
        ("luke", {**SMALL, "entity_emb_size": 8, "entity_vocab_size": 10}),
        ("longformer", {**SMALL, "attention_window": [8, 8]}),
    ],
)
def test_the_whole_window_can_be_read(model_type: str, fields: dict[str, Any]):
    model = built(model_type, {**fields, "max_position_embeddings": 66}, max_length=65)
    assert len(model.renderer.encode("long " * 100, "text").ids) == 65
    assert model.score(["long " * 100], ["text"]).isfinite().all()
    with pytest.raises(ConfigError, match="at most 65"):
        built(model_type, {**fields, "max_position_embeddings": 66}, max_length=66)
