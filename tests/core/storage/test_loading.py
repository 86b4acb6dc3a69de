"""A model comes from where the user says or not at all, with its head, rendering and length as they were."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.storage.loading import PAYLOAD_KEY, checkpoint_payload
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.locations import SourceKind, resolve_source
from tests.builders import (
    FAMILIES,
    decoder_tokenizer,
    tiny_config,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
)

PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?"], ["Hello, 日本.", "4"]


def reward_model(family: str, **options: object) -> BradleyTerryRM:
    return BradleyTerryRM(tiny_model(family), tokenizer=tiny_tokenizer(family), max_length=77, **options)


def lightning_checkpoint(model: BradleyTerryRM, path: Path, **changes: object) -> Path:
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {"state_dict": state, "global_step": 3, PAYLOAD_KEY: checkpoint_payload(model), **changes}
    torch.save({name: value for name, value in content.items() if value is not None}, path)
    return path


def base_folder(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A backbone without a head, as base models are published."""
    tokenizer = tiny_tokenizer(family)
    tiny_model(family, tokenizer).base_model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_export_run_folder_and_checkpoint_load_to_the_same_rewards(family: str, tmp_path: Path):
    model = reward_model(family)
    rewards = model.score(PROMPTS, RESPONSES)
    model.save_pretrained(tmp_path / "run" / "best")
    checkpoint = lightning_checkpoint(model, tmp_path / "last.ckpt")
    for source in (tmp_path / "run" / "best", str(tmp_path / "run"), checkpoint):
        loaded = BradleyTerryRM.from_pretrained(source)
        # the same bits of weights, at other addresses: MKL's sums depend on their alignment
        assert torch.allclose(loaded.score(PROMPTS, RESPONSES), rewards, rtol=0, atol=1e-6)
        assert loaded.identity() == model.identity()
        assert loaded.max_length == 77
        assert not loaded.training
        assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert BradleyTerryRM.from_pretrained(checkpoint, max_length=50).max_length == 50


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_gets_a_fresh_seeded_head_and_keeps_its_backbone(family: str, tmp_path: Path):
    folder = base_folder(family, tmp_path)
    first, again, other = (BradleyTerryRM.from_pretrained(folder, seed=seed, new_head=True) for seed in (1, 1, 2))
    assert first.head_init.startswith("normal")
    assert "seed=1" in first.head_init
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.reward_head.weight, other.reward_head.weight)
    backbone = AutoModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, backbone[name]) for name, value in first.model.base_model.state_dict().items())
    ids = first.tokenize(PROMPTS, RESPONSES)
    margin = first(**ids).diff()
    assert float(torch.nn.functional.softplus(margin.detach())) == pytest.approx(math.log(2), rel=0.3)


def test_a_head_that_is_stored_is_not_drawn_again(tmp_path: Path):
    tokenizer = tiny_tokenizer("llama")
    plain = tiny_model("llama", tokenizer)
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = BradleyTerryRM.from_pretrained(tmp_path)
    assert torch.equal(loaded.reward_head.weight, plain.score.weight)
    assert loaded.head_init == "from the checkpoint"


def test_weights_are_float32_unless_asked_otherwise(tmp_path: Path):
    base_folder("llama", tmp_path, torch.bfloat16)
    whole = BradleyTerryRM.from_pretrained(tmp_path, new_head=True)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    half = BradleyTerryRM.from_pretrained(tmp_path, dtype="bfloat16", new_head=True)
    assert half.model.dtype is torch.bfloat16
    assert half.reward_head.weight.dtype is torch.float32
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        BradleyTerryRM.from_pretrained(tmp_path, dtype="bfloat61")


def test_dropout_of_the_checkpoint_is_off_unless_kept(tmp_path: Path):
    base_folder("bert", tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).hidden_dropout_prob == 0.1
    for dropout in (False, True):
        model = BradleyTerryRM.from_pretrained(tmp_path, dropout=dropout, new_head=True).train()
        batch = model.tokenize(PROMPTS, RESPONSES)
        assert torch.equal(model(**batch), model(**batch)) is not dropout


@pytest.mark.parametrize(
    "name", ["missing/", "./missing", "/nowhere/model", "~/nowhere", "a/b/c", "last.ckpt", "up/last.ckpt"]
)
def test_a_missing_path_is_said_to_be_missing_and_never_asked_of_the_hub(name: str):
    with pytest.raises(CheckpointError, match="the path does not exist"):
        BradleyTerryRM.from_pretrained(name)


def test_a_name_under_an_existing_folder_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_source("outputs/run").kind is SourceKind.HUB
    (tmp_path / "outputs").mkdir()
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source("outputs/run")


def test_a_hub_id_that_cannot_be_fetched_gives_one_sentence():
    with pytest.raises(
        CheckpointError, match="no-such-owner/no-such-model cannot be loaded as a reward model"
    ) as caught:
        BradleyTerryRM.from_pretrained("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_folders_and_files_without_a_model_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        BradleyTerryRM.from_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"got the file .*notes\.txt"):
        BradleyTerryRM.from_pretrained(tmp_path / "notes.txt")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter alone"):
        BradleyTerryRM.from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{ torn")
    with pytest.raises(CheckpointError, match="cannot be loaded as a reward model"):
        BradleyTerryRM.from_pretrained(tmp_path)


def test_torn_weights_give_one_sentence(tmp_path: Path):
    reward_model("llama").save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be loaded as a reward model"):
        BradleyTerryRM.from_pretrained(tmp_path / "model")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGES = {
    r"model\.safetensors is truncated: only 5,000 bytes": lambda f: cut(f / "model.safetensors", 5000),
    r"model\.safetensors is empty": lambda f: cut(f / "model.safetensors", 0),
    r"config\.json is damaged: it is no whole JSON": lambda f: cut(f / "config.json", 40),
    r"config\.json is empty": lambda f: cut(f / "config.json", 0),
    r"tokenizer\.json is damaged": lambda f: cut(f / "tokenizer.json", 100),
    "it holds no tokenizer": lambda f: [file.unlink() for file in f.glob("tokenizer*")],
    "it holds no weights": lambda f: (f / "model.safetensors").unlink(),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    reward_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sentence", DAMAGES)
def test_the_file_that_is_torn_or_missing_is_named(sentence: str, whole: Path, tmp_path: Path):
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    DAMAGES[sentence](folder)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        BradleyTerryRM.from_pretrained(folder)
    assert str(caught.value).endswith("export the model again")


def test_a_missing_shard_is_named(tmp_path: Path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer("llama").save_pretrained(tmp_path)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing, which model.safetensors.index.json names"):
        BradleyTerryRM.from_pretrained(tmp_path)


def test_a_classifier_with_two_labels_is_refused(tmp_path: Path):
    tokenizer = tiny_tokenizer("bert")
    config = tiny_config("bert", num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="one label, got a classifier with 2 labels"):
        BradleyTerryRM.from_pretrained(tmp_path)


def test_a_checkpoint_that_lacks_part_of_the_backbone_is_refused(tmp_path: Path):
    tokenizer = tiny_tokenizer("llama")
    model = tiny_model("llama", tokenizer)
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="lacks 3 weights of the LlamaForSequenceClassification backbone"):
        BradleyTerryRM.from_pretrained(tmp_path)


def test_foreign_and_torn_checkpoints_are_refused(tmp_path: Path):
    model = reward_model("llama")
    foreign = lightning_checkpoint(model, tmp_path / "foreign.ckpt", **{PAYLOAD_KEY: None})
    with pytest.raises(CheckpointError, match="was not written by RM-Optimizer"):
        BradleyTerryRM.from_pretrained(foreign)
    whole = lightning_checkpoint(model, tmp_path / "whole.ckpt")
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(whole.read_bytes()[:9000])
    with pytest.raises(CheckpointError, match=r"torn\.ckpt cannot be read as a checkpoint: it is damaged, or none"):
        BradleyTerryRM.from_pretrained(torn)
    code = tmp_path / "code.ckpt"
    torch.save({"state_dict": {}, PAYLOAD_KEY: Path("an object that needs code to load")}, code)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint: it holds objects that only code"):
        BradleyTerryRM.from_pretrained(code)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    state.pop("model.model.score.weight")
    partial = lightning_checkpoint(model, tmp_path / "partial.ckpt", state_dict=state)
    with pytest.raises(CheckpointError, match=r"1 weights are missing and 0 unknown, among them score\.weight"):
        BradleyTerryRM.from_pretrained(partial)


def test_another_rendering_than_the_recorded_one_is_refused(tmp_path: Path):
    model = reward_model("llama")
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    content = json.loads(config.read_text())
    content["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="chat template"):
        BradleyTerryRM.from_pretrained(tmp_path / "model")


def test_a_model_trained_with_a_render_fn_needs_it_again(tmp_path: Path):
    def shout(messages: tuple[Message, ...], response: str) -> str:
        return f"{messages[-1].content.upper()} -> {response}"

    model = reward_model("llama", render_fn=shout)
    model.save_pretrained(tmp_path / "model")
    checkpoint = lightning_checkpoint(model, tmp_path / "last.ckpt")
    for source in (tmp_path / "model", checkpoint):
        with pytest.raises(CheckpointError, match="render_fn"):
            BradleyTerryRM.from_pretrained(source)
        with pytest.raises(CheckpointError, match="rendering"):
            BradleyTerryRM.from_pretrained(source, render_fn=lambda messages, response: response)
        loaded = BradleyTerryRM.from_pretrained(source, render_fn=shout)
        assert torch.equal(loaded.score(PROMPTS, RESPONSES), model.score(PROMPTS, RESPONSES))


def test_the_pad_choice_survives_a_checkpoint(tmp_path: Path):
    tokenizer = decoder_tokenizer(pad="</s>")
    model = tiny_reward_model("llama", tokenizer, max_length=64, spare_rows=3)
    assert model.pad_choice.token == "<|pad|>"
    loaded = BradleyTerryRM.from_pretrained(lightning_checkpoint(model, tmp_path / "last.ckpt"))
    assert loaded.pad_choice == model.pad_choice
    assert loaded.tokenizer.pad_token_id == loaded.model.config.pad_token_id == model.pad_choice.token_id


@pytest.mark.skipif("RM_OPT_MINILM" not in os.environ, reason="RM_OPT_MINILM names no folder with MiniLM's weights")
def test_minilm_loads_starts_at_chance_and_reloads(tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(os.environ["RM_OPT_MINILM"], new_head=True)
    assert model.model.config.hidden_size == 384
    assert 256 <= model.max_length <= 512
    assert model.score_pair("Hi", "Hello.", "No.") == pytest.approx(0, abs=0.2)
    assert model.save_pretrained(tmp_path / "model").is_passed
    loaded = BradleyTerryRM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.score(PROMPTS, RESPONSES), model.score(PROMPTS, RESPONSES))


def stored(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A trained llama reward model as other software has it, with its weights changed."""
    reward_model("llama").save_pretrained(folder)
    (folder / "export.json").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "score.bias",
        "mean",
        "v_head.weight",
        "model.layers.7.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_stored_weight_that_is_not_read_is_refused_by_name(name: str, tmp_path: Path):
    folder = stored(tmp_path, lambda weights: weights | {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"does not read, among them {name}"):
        BradleyTerryRM.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.pooler.dense.bias"]
)
def test_a_stored_weight_without_a_part_in_rewards_is_passed_over(name: str, tmp_path: Path):
    folder = stored(tmp_path, lambda weights: weights | {name: torch.ones(1)})
    assert BradleyTerryRM.from_pretrained(folder).score(PROMPTS, RESPONSES).isfinite().all()


@pytest.mark.parametrize(
    "name",
    ["v_head.summary.weight", "value_head.weight", "score.2.weight", "regression_head.weight", "score_head.weight"],
)
def test_a_trained_head_of_another_form_is_called_that(name: str, tmp_path: Path):
    folder = stored(
        tmp_path, lambda weights: {name if key == "score.weight" else key: value for key, value in weights.items()}
    )
    with pytest.raises(CheckpointError, match=f"trained reward head in another form.*stored as {name}"):
        BradleyTerryRM.from_pretrained(folder)
    assert BradleyTerryRM.from_pretrained(folder, new_head=True)


@pytest.mark.parametrize("head", ["score.weight", "other.weight"])
def test_the_file_of_a_value_head_is_named(head: str, tmp_path: Path):
    folder = stored(tmp_path, lambda weights: {head if key == "score.weight" else key: weights[key] for key in weights})
    save_file({"v_head.summary.weight": torch.ones(1, 32)}, tmp_path / "value_head.safetensors")
    says = "trained reward head in another form" if head == "other.weight" else "does not read, among them"
    with pytest.raises(CheckpointError, match=rf"{says}.*value_head\.safetensors"):
        BradleyTerryRM.from_pretrained(folder)


def test_a_layer_beyond_the_configuration_is_refused_in_a_base_too(tmp_path: Path):
    base_folder("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"layers.7.mlp.up_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.7\.mlp"):
        BradleyTerryRM.from_pretrained(tmp_path, new_head=True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_the_prefix_of_a_wrapper_is_named(prefix: str, tmp_path: Path):
    folder = stored(tmp_path, lambda weights: {prefix + key: value for key, value in weights.items()})
    with pytest.raises(CheckpointError, match=f"which it stores as {prefix}.*rm-opt import"):
        BradleyTerryRM.from_pretrained(folder)


def test_a_head_of_zeros_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = stored(tmp_path, lambda weights: weights | {"score.weight": torch.zeros_like(weights["score.weight"])})
    BradleyTerryRM.from_pretrained(folder)
    assert "reward head of zeros" in caplog.text


def test_gradient_checkpointing_of_a_family_without_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base_folder("llama", tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.supports_gradient_checkpointing", False)
    monkeypatch.setattr("transformers.LlamaPreTrainedModel.supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="has no gradient checkpointing; set"):
        BradleyTerryRM.from_pretrained(tmp_path, new_head=True, gradient_checkpointing=True)
