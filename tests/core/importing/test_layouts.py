"""Exports for other projects score by a few lines after each project's own loading rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

from rm_optimizer import BradleyTerryRM, CheckpointError, ConfigError, export_reward_model, import_reward_model
from rm_optimizer.core.importing.exporting import rescale
from rm_optimizer.interfaces.cli import app
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.core.importing.published import CONVERSATIONS

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def model_of(family: str, *, constant: float = 0.0, **fields: Any) -> BradleyTerryRM:
    tokenizer = None if family in ("bert", "modernbert") else decoder_tokenizer(chat_template=TEMPLATE)
    model = tiny_reward_model(family, tokenizer, **fields)
    if constant:
        rescale(model, 1.0, constant)
    return model


def texts_of(folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in CONVERSATIONS]
    return [tokenizer.apply_chat_template(each, tokenize=False) for each in turns]


def by_trl(folder: Path) -> torch.Tensor:
    """A classifier with one label; the chat template's text without special tokens, padded on the right."""
    trusts = (folder / "modeling_reward.py").exists()
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, trust_remote_code=trusts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    texts = texts_of(folder)
    batch = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    return model(**batch).logits[:, 0]


def by_openrlhf(folder: Path) -> torch.Tensor:
    """The backbone and a linear layer under `value_head_prefix`; padding on the left, positions by the mask."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert config["model_type"] in ("llama", "qwen2")
    head = tensors.pop(f"{config.get('value_head_prefix', 'score')}.weight")
    backbone = AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()
    backbone.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = texts_of(folder)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    mask = batch["attention_mask"]
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    rewards = backbone(**batch, position_ids=places).last_hidden_state[:, -1] @ head[0]
    return (rewards - config["mean"]) / config["std"] if config.get("normalize_reward") else rewards


def by_llama_factory(folder: Path) -> torch.Tensor:
    """A causal model's last states and TRL's value head, read at the last attended token."""
    head = load_file(folder / "value_head.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = texts_of(folder)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    states = model(**batch, output_hidden_states=True).hidden_states[-1].float()
    values = states @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]
    return values[..., 0].gather(1, batch["attention_mask"].sum(-1, keepdim=True) - 1)[:, 0]


def by_vllm(folder: Path) -> torch.Tensor:
    """The backbone and `score` at the last token; the text's own special tokens; no activation for a regression."""
    tensors, config = load_file(folder / "model.safetensors"), AutoConfig.from_pretrained(folder)
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    head = tensors.pop("score.weight")
    backbone = AutoModel.from_config(config).eval()
    backbone.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
    rows = AutoTokenizer.from_pretrained(folder)(texts_of(folder))["input_ids"]
    return torch.stack([backbone(torch.tensor([row])).last_hidden_state[0, -1] @ head[0] for row in rows])


REQUIRED = {
    "bert": "id2label label2id vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "hidden_act hidden_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps "
    "pad_token_id",
    "modernbert": "id2label label2id vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "hidden_activation max_position_embeddings initializer_range initializer_cutoff_factor norm_eps norm_bias "
    "pad_token_id eos_token_id bos_token_id cls_token_id sep_token_id global_rope_theta attention_bias "
    "attention_dropout global_attn_every_n_layers local_attention local_rope_theta classifier_activation",
}
"""Entries of config.json without which text-embeddings-inference does not start."""


def by_tei(folder: Path) -> torch.Tensor:
    """The state at CLS, the pooler and the classifier; ids of tokenizer.json with special tokens; raw scores."""
    config = json.loads((folder / "config.json").read_text())
    assert [name for name in REQUIRED[config["model_type"]].split() if config.get(name) is None] == []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    renderer = BradleyTerryRM.from_pretrained(folder).renderer
    rows = [tokenizer.encode(renderer.text(prompt, response)).ids for prompt, response in CONVERSATIONS]
    if config["model_type"] == "modernbert":
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        return torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
    tensors = load_file(folder / "model.safetensors")
    backbone = AutoModel.from_pretrained(folder)
    states = torch.stack([backbone(torch.tensor([row])).last_hidden_state[0, 0] for row in rows])
    pooled = torch.tanh(states @ tensors["bert.pooler.dense.weight"].T + tensors["bert.pooler.dense.bias"])
    return (pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"])[:, 0]


RULES = {
    "trl": by_trl,
    "openrlhf": by_openrlhf,
    "llama-factory": by_llama_factory,
    "vllm": by_vllm,
    "tei": by_tei,
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("project", "family", "constant"),
    [
        ("trl", "qwen2", 0.0),
        ("trl", "llama", 0.7),
        ("openrlhf", "qwen2", 0.0),
        ("openrlhf", "llama", 0.7),
        ("llama-factory", "qwen2", 0.0),
        ("llama-factory", "llama", 0.7),
        ("vllm", "llama", 0.0),
        ("tei", "bert", 0.0),
        ("tei", "modernbert", 0.0),
    ],
)
def test_an_export_scores_by_the_rule_of_its_project(project: str, family: str, constant: float, tmp_path: Path):
    model = model_of(family, constant=constant)
    prompts, responses = map(list, zip(*CONVERSATIONS, strict=True))
    expected = model.score(prompts, responses)
    model.save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--for", project]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "use: " in result.output
    torch.testing.assert_close(RULES[project](tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("project", ["openrlhf", "llama-factory"])
def test_a_layout_of_another_project_is_imported_again_and_never_scored_otherwise(project: str, tmp_path: Path):
    model = model_of("llama", constant=0.7)
    model.save_pretrained(tmp_path / "model")
    made = export_reward_model(tmp_path / "model", tmp_path / "out", project=project, dtype="bfloat16")
    assert made.dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="rm-opt import"):
        BradleyTerryRM.from_pretrained(tmp_path / "out")
    import_reward_model(tmp_path / "out", tmp_path / "again", append="")
    prompts, responses = map(list, zip(*CONVERSATIONS, strict=True))
    expected = BradleyTerryRM.from_pretrained(tmp_path / "model", dtype="bfloat16").score(prompts, responses)
    again = BradleyTerryRM.from_pretrained(tmp_path / "again", dtype="bfloat16").score(prompts, responses)
    torch.testing.assert_close(again, expected, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(
    ("project", "family", "constant", "message"),
    [
        ("vlm", "llama", 0.0, "did you mean 'vllm'"),
        ("trl", "bert", 0.0, "trl cannot read this model: it renders by a chat template, and the tokenizer has none"),
        ("vllm", "llama", 0.7, "its reward heads are one linear layer, without a bias in a decoder"),
        ("openrlhf", "bert", 0.0, "it reads one linear layer at the last token of a decoder"),
        ("tei", "llama", 0.0, "its classifiers are bert, "),
    ],
)
def test_a_model_that_a_project_cannot_read_is_refused(
    project: str, family: str, constant: float, message: str, tmp_path: Path
):
    model_of(family, constant=constant).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        export_reward_model(tmp_path / "model", tmp_path / "out", project=project)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="leave --adapter or --for out"):
        export_reward_model(tmp_path / "model", tmp_path / "out", project=project, adapter_only=True)
