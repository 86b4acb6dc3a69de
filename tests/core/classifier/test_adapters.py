"""An adapter trains what it should, never loses the reward head, and scores from every file as it does in memory."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rm_optimizer.core.classifier.adapters import add_adapter, has_adapter, lora_config, saved_modules
from rm_optimizer.core.classifier.building import LoadOptions
from rm_optimizer.core.classifier.head import head_side_modules, require_trainable_head
from rm_optimizer.core.classifier.quantization import is_quantized, quantization_arguments, unpacked
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage import adapter_files
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.core.storage.loading import PAYLOAD_KEY, checkpoint_payload, load_model
from rm_optimizer.errors import CheckpointError, ConfigError, MissingExtra
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from tests.builders import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    fresh_reward_model,
    stored_certificate,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
)

PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?", "Name a colour."], ["Hello, 日本.", "4", "Blue is the colour of the sky."]
LORA = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8.0, dropout=0.0)
ALL_FAMILIES = [*DECODERS, *ENCODERS]
# transformers' DeBERTa calls torch.jit.script when it is imported.
quiet_deberta = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
EXPECTED_TARGETS = {
    "llama": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
    "qwen2": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
    "gemma": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
    "mistral": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
    "gpt2": "c_attn c_fc c_proj",
    "opt": "fc1 fc2 k_proj out_proj q_proj v_proj",
    "bert": "dense key query value",
    "distilbert": "k_lin lin1 lin2 out_lin q_lin v_lin",
    "roberta": "dense key query value",
    "deberta-v2": "dense key_proj query_proj value_proj",
    "modernbert": "Wi Wo Wqkv",
}
EXPECTED_HEAD_SIDE = {
    "bert": ("bert.pooler", "classifier"),
    "distilbert": ("pre_classifier", "classifier"),
    "roberta": ("classifier",),
    "deberta-v2": ("pooler", "classifier"),
    "modernbert": ("head", "classifier"),
}


def base_folder(family: str, folder: Path) -> Path:
    """A base model as published: a backbone without a head."""
    tokenizer = tiny_tokenizer(family)
    tiny_model(family, tokenizer).base_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def in_memory(family: str) -> BradleyTerryRM:
    return tiny_reward_model(family, max_length=64).eval()


def scrambled(model: BradleyTerryRM, seed: int = 3) -> BradleyTerryRM:
    """Give everything that trains other values, so that whatever is lost on the way shows in the rewards."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise.to(parameter.device, parameter.dtype))
    return model


def adapted(family: str, folder: Path, config: AdapterConfig | LoraConfig = LORA) -> BradleyTerryRM:
    model = BradleyTerryRM.from_pretrained(base_folder(family, folder), max_length=64, new_head=True)
    add_adapter(model.model, config, seed=0)
    return scrambled(model)


def lightning_checkpoint(model: BradleyTerryRM, path: Path) -> Path:
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, PAYLOAD_KEY: checkpoint_payload(model)}, path)
    return path


@quiet_deberta
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_adapts_its_attention_and_mlp_and_nothing_else(family: str):
    model = in_memory(family)
    add_adapter(model.model, LORA, seed=0)
    adapters = [name for name, _ in model.model.named_modules() if name.endswith(".lora_A")]
    assert " ".join(sorted({name.split(".")[-2] for name in adapters})) == EXPECTED_TARGETS[family]
    head_side = head_side_modules(model.model)
    assert set(head_side) == set(saved_modules(model.model))
    assert head_side == EXPECTED_HEAD_SIDE.get(family, ("score",))
    for name, parameter in model.model.named_parameters():
        trains = "lora_A" in name or "lora_B" in name or name.startswith(tuple(f"{part}." for part in head_side))
        assert parameter.requires_grad == trains, name
    assert model.head_parameter_names()[0].removeprefix("model.") in dict(model.model.named_parameters())


@quiet_deberta
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_rewards_are_the_bases_own_until_the_first_step(family: str):
    model = in_memory(family)
    before = model.score(PROMPTS, RESPONSES)
    add_adapter(model.model, LORA, seed=0)
    assert torch.equal(model.score(PROMPTS, RESPONSES), before)
    assert not model.training


@quiet_deberta
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_merged_export_scores_as_memory_and_leaves_memory_alone(family: str, tmp_path: Path):
    model = in_memory(family)
    untouched = model.score(PROMPTS, RESPONSES)
    add_adapter(model.model, LORA, seed=0)
    scrambled(model)
    rewards, state = model.score(PROMPTS, RESPONSES), {k: v.clone() for k, v in model.state_dict().items()}
    assert (rewards - untouched).abs().min() > 1e-3
    assert model.save_pretrained(tmp_path / "merged").is_passed
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.score(PROMPTS, RESPONSES), rewards)
    again = BradleyTerryRM.from_pretrained(tmp_path / "merged")
    assert not has_adapter(again.model)
    torch.testing.assert_close(again.score(PROMPTS, RESPONSES), rewards, rtol=1e-4, atol=1e-4)
    plain, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert "peft" not in type(plain).__module__


@quiet_deberta
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_adapter_folder_scores_as_memory_through_us_and_through_plain_peft(family: str, tmp_path: Path):
    model = adapted(family, tmp_path / "base")
    rewards = model.score(PROMPTS, RESPONSES)
    certificate = save_adapter(model, tmp_path / "adapter")
    assert certificate.is_passed
    assert stored_certificate(tmp_path / "adapter") == certificate
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = BradleyTerryRM.from_pretrained(tmp_path / "adapter", seed=9)
    assert torch.equal(again.score(PROMPTS, RESPONSES), rewards)
    assert again.identity() == model.identity()
    assert again.max_length == 64
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trains
    assert save_adapter(again, tmp_path / "second").is_passed


@quiet_deberta
@pytest.mark.parametrize("family", ["gpt2", "opt", *ENCODERS])  # the other decoders' norms compute in float32
def test_merging_is_exact_up_to_rounding(family: str, tmp_path: Path):
    model = in_memory(family).double()
    add_adapter(model.model, LORA, seed=0)
    assert scrambled(model).save_pretrained(tmp_path / "merged").relative_difference < 1e-10


def test_a_lost_factor_fails_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = adapted("llama", tmp_path / "base")
    merged = adapter_files.merged_state

    def without_one(plain: PreTrainedModel) -> dict[str, torch.Tensor]:
        name = "model.layers.1.mlp.up_proj"
        return merged(plain) | {f"{name}.weight": plain.get_submodule(name).base_layer.weight}

    monkeypatch.setattr(adapter_files, "merged_state", without_one)
    with pytest.raises(CheckpointError, match="does not score as the model does"):
        model.save_pretrained(tmp_path / "merged")


def test_peft_finds_base_and_head_from_the_adapter_folder_alone(tmp_path: Path):
    model = adapted("llama", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
    theirs.config.pad_token_id = model.pad_choice.token_id
    with torch.no_grad():
        logits = theirs(**model.tokenize(PROMPTS, RESPONSES)).logits[:, 0]
    torch.testing.assert_close(logits, model.score(PROMPTS, RESPONSES), rtol=1e-5, atol=1e-5)


def test_modules_to_save_and_several_adapters_are_read_as_peft_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    base = AutoModelForSequenceClassification.from_pretrained(base_folder("llama", tmp_path / "base"), num_labels=1)
    options = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], modules_to_save=["score", "norm"])
    adapted = get_peft_model(base, options).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    adapted.add_adapter("other", options)
    adapted.save_pretrained(tmp_path / "adapter")
    model = BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    assert "also holds the adapters other, which are not read" in caplog.text
    ids = torch.tensor([model.encode("Hi", "Yes.")[0].ids])
    with torch.no_grad():
        assert float(model.score("Hi", "Yes.")) == pytest.approx(float(adapted(ids).logits), abs=1e-5)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds adapters, each in its folder; give one: .*other"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_checkpoint_keeps_the_adapter_trainable(family: str, tmp_path: Path):
    model = adapted(family, tmp_path / "base")
    path = lightning_checkpoint(model, tmp_path / "last.ckpt")
    again = BradleyTerryRM.from_pretrained(path, seed=5)
    assert torch.equal(again.score(PROMPTS, RESPONSES), model.score(PROMPTS, RESPONSES))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in again.named_parameters()} == flags
    assert again.head_parameter_names() == model.head_parameter_names()
    assert lora_config(again.model).to_dict() == lora_config(model.model).to_dict()
    assert save_adapter(again, tmp_path / "adapter").is_passed, "the checkpoint remembers where its base is"


def counts(sentence: str | None) -> list[int]:
    """Trainable parameters, all, those of the factors and those beside, of the sentence on them."""
    form = r"trains ([\d,]+) of ([\d,]+) parameters \(.+ %\): ([\d,]+) in LoRA factors, ([\d,]+) in the reward head"
    found = re.match(form, sentence or "")
    assert found is not None, sentence
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_optimizer_finds_factors_and_head(family: str):
    model = in_memory(family)
    trainable, total, adapter, head_side = counts(add_adapter(model.model, LORA, seed=0))
    roles = partition(model, head_names=model.head_parameter_names())
    sizes: dict[str, int] = {}
    for item in roles.parameters:
        sizes[item.role] = sizes.get(item.role, 0) + item.parameter.numel()
    assert sizes.pop("lora") == adapter
    assert set(sizes) == ({"head", "new", "bias"} if family == "bert" else {"head"})
    assert sum(sizes.values()) == head_side
    assert trainable == adapter + head_side
    assert total == sum(parameter.numel() for parameter in model.parameters())


def test_factor_counts_follow_from_shapes():
    model, hidden, inner, kv = in_memory("llama"), 32, 64, 16
    _, _, adapter, head_side = counts(add_adapter(model.model, LORA, seed=0))
    layers = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, inner)] * 2 + [(inner, hidden)]
    assert adapter == 2 * sum(4 * (rows + columns) for rows, columns in layers)
    assert head_side == hidden


def test_factors_follow_the_seed_and_leave_the_global_stream_alone():
    models = [in_memory("llama") for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_adapter(model.model, LORA, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = ({k: v for k, v in m.state_dict().items() if "lora_A" in k} for m in models)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items())


def gradients(model: BradleyTerryRM) -> Iterator[tuple[str, torch.Tensor]]:
    model.train()
    ids = model.tokenize(PROMPTS, RESPONSES)
    model(**ids).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            yield name, parameter.grad.clone()
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_factors_and_head_also_with_checkpointing(family: str, tmp_path: Path):
    folder = base_folder(family, tmp_path)
    plain, recomputed = (
        BradleyTerryRM.from_pretrained(folder, max_length=64, new_head=True, gradient_checkpointing=on)
        for on in (False, True)
    )
    for model in (plain, recomputed):
        add_adapter(model.model, LORA, seed=0)
        scrambled(model)
    expected, got = dict(gradients(plain)), dict(gradients(recomputed))
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient)
        if "key" not in name or "bias" not in name:
            assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_dropout_is_not_silenced_by_the_dropout_switch(family: str, tmp_path: Path):
    with_dropout = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8.0, dropout=0.5)
    model = adapted(family, tmp_path / "base", with_dropout)
    path = lightning_checkpoint(model, tmp_path / "last.ckpt")
    save_adapter(model, tmp_path / "adapter")
    for source in (model, BradleyTerryRM.from_pretrained(path), BradleyTerryRM.from_pretrained(tmp_path / "adapter")):
        ids = source.tokenize(PROMPTS, RESPONSES)
        source.train()
        assert not torch.equal(source(**ids), source(**ids))
        source.eval()
        assert torch.equal(source(**ids), source(**ids))


def test_a_users_lora_config_is_copied_with_only_what_must_change():
    model = in_memory("bert")
    given = LoraConfig(r=3, lora_alpha=5, target_modules=["query", "dense"], use_rslora=True, bias="none")
    before = given.to_dict()
    add_adapter(model.model, given, seed=0)
    assert given.to_dict() == before
    changed = {name for name, value in lora_config(model.model).to_dict().items() if value != before[name]}
    assert changed == {"task_type", "modules_to_save", "exclude_modules"}
    assert set(lora_config(model.model).exclude_modules) == {"bert.pooler.dense"}


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules="all-linear"),
        LoraConfig(r=2, target_modules=r".*\.(query|dense)"),
        LoraConfig(r=2, target_modules=["query"], bias="lora_only"),
        LoraConfig(r=2, target_modules=["query"], bias="all"),
        LoraConfig(r=2, target_modules=["value"], use_dora=True),
        LoraConfig(r=2, target_modules=["key"], modules_to_save=["LayerNorm"]),
        LoraConfig(r=2, target_modules=["key", "query"], rank_pattern={"query": 3}, exclude_modules=r".*layer\.0.*"),
        LoraConfig(r=2, target_modules=["key"], target_parameters=["encoder.layer.0.attention.self.query.weight"]),
    ],
    ids=["all-linear", "regex", "bias-lora", "bias-all", "dora", "more-modules", "patterns", "parameters"],
)
def test_peft_options_survive_adapter_folder_and_merge(config: LoraConfig, tmp_path: Path):
    model = adapted("bert", tmp_path / "base", config)
    rewards = model.score(PROMPTS, RESPONSES)
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(BradleyTerryRM.from_pretrained(tmp_path / "adapter").score(PROMPTS, RESPONSES), rewards)
    model.save_pretrained(tmp_path / "merged")
    merged = BradleyTerryRM.from_pretrained(tmp_path / "merged").score(PROMPTS, RESPONSES)
    torch.testing.assert_close(merged, rewards, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdapterConfig(kind=AdapterKind.lora, rank=1, alpha=1.0, dropout=0.0, targets=["q_prj"]), "known: .*q_proj"),
        (
            AdapterConfig(kind=AdapterKind.lora, rank=1, alpha=1.0, dropout=0.0, targets=["q_proj", "vproj", "k_prj"]),
            r"got k_prj, vproj; known: (?!.*score).*v_proj",
        ),
        (
            AdapterConfig(kind=AdapterKind.lora, rank=1, alpha=1.0, dropout=0.0, targets=["score"]),
            r"got score; known: (?!.*score).*v_proj",
        ),
        (AdapterConfig(kind=AdapterKind.qlora, rank=1, alpha=1.0, dropout=0.0), "adapter=qlora needs a base"),
        (LoraConfig(init_lora_weights="pissa"), "init_lora_weights must be left"),
        (LoraConfig(trainable_token_indices=[1]), r"LoraConfig.trainable_token_indices must be left.* got \[1\]"),
        (LoraConfig(lora_bias=True), "LoraConfig.lora_bias must be left"),
        (LoraConfig(r=3, modules_to_save="score"), "LoraConfig.modules_to_save must be left.* got 'score'"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(config: AdapterConfig | LoraConfig, message: str):
    model = in_memory("llama")
    with pytest.raises(ConfigError, match=message):
        add_adapter(model.model, config, seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_adapter_and_a_frozen_head_are_refused():
    model = in_memory("llama")
    model.reward_head.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"the reward head score must be trainable, but its weight"):
        require_trainable_head(model.model)
    add_adapter(model.model, LORA, seed=0)
    require_trainable_head(model.model)
    with pytest.raises(ConfigError, match="carries a LoRA adapter already"):
        add_adapter(model.model, LORA, seed=0)


def test_no_adapter_changes_nothing():
    model = in_memory("llama")
    assert add_adapter(model.model, AdapterConfig(), seed=0) is None
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_without_a_base_to_load_again_is_refused_but_merges(tmp_path: Path):
    tokenizer = tiny_tokenizer("llama")
    model = fresh_reward_model("llama", tokenizer)
    add_adapter(model.model, LORA, seed=0)
    with pytest.raises(CheckpointError, match="needs a base that can be loaded again"):
        save_adapter(scrambled(model), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
    assert model.save_pretrained(tmp_path / "merged").is_passed
    with pytest.raises(CheckpointError, match="has no adapter"):
        save_adapter(in_memory("llama"), tmp_path / "adapter")


def test_another_base_than_the_recorded_one_is_noticed(tmp_path: Path):
    save_adapter(adapted("llama", tmp_path / "base"), tmp_path / "adapter")
    tiny_model("llama", seed=8).base_model.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match="belongs to other weights"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")


def test_the_same_base_in_another_type_is_the_same_base(tmp_path: Path):
    save_adapter(adapted("llama", tmp_path / "base"), tmp_path / "adapter")
    double = BradleyTerryRM.from_pretrained(tmp_path / "adapter", dtype="float64")
    assert double.score(PROMPTS, RESPONSES).dtype == torch.float64
    half = BradleyTerryRM.from_pretrained(tmp_path / "adapter", dtype="bfloat16")
    types = {p.dtype for p in half.parameters() if p.requires_grad}
    assert types == {torch.float32}


def test_an_adapter_that_lost_its_head_or_a_tensor_is_refused(tmp_path: Path):
    model = adapted("llama", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    weights = adapter_files.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights.pop("base_model.model.score.weight")
    adapter_files.save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit its base: 1 tensors, such as .*score"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": None}))
    with pytest.raises(CheckpointError, match="without its reward head"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")


def test_an_adapter_whose_base_is_an_adapter_is_refused(tmp_path: Path):
    save_adapter(adapted("llama", tmp_path / "base"), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    itself = {"base_model_name_or_path": str(tmp_path / "adapter")}
    config.write_text(json.dumps(json.loads(config.read_text()) | itself))
    with pytest.raises(CheckpointError, match=r"needs a whole model as its base, but .*adapter is an adapter too"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")


def made_by_peft(folder: Path, *, num_labels: int = 1, new_tokens: int = 0, **options: Any) -> PeftModel:
    """An adapter saved by plain peft in `folder/adapter`, its factors and head not at their start."""
    base_folder("llama", folder / "base")
    tokenizer = tiny_tokenizer("llama")
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    if num_labels > 1:
        plain.score = torch.nn.Linear(32, num_labels, bias=False)
    if new_tokens:
        tokenizer.add_tokens([f"<new{i}>" for i in range(new_tokens)])
        plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lora = LoraConfig(**{"r": 2, "task_type": "SEQ_CLS", "modules_to_save": ["score"], **options})
    theirs = get_peft_model(plain, lora).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in theirs.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)) if parameter.requires_grad else None
    with warnings.catch_warnings(action="ignore"):  # peft says that it stores the embeddings
        theirs.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    return theirs


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "new_tokens": 2},
        {"target_modules": ["q_proj"], "new_tokens": 2, "modules_to_save": ["score", "embed_tokens"]},
    ],
    ids=["DoRA", "embeddings", "new tokens", "trained embeddings"],
)
def test_forms_of_adapters_made_by_peft_load_merge_and_score_as_there(options: dict[str, Any], tmp_path: Path):
    theirs = made_by_peft(tmp_path, **options)
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "adapter")  # axolotl writes it there
    model = BradleyTerryRM.from_pretrained(tmp_path / "adapter", max_length=64)
    with torch.no_grad():
        theirs.base_model.model.config.pad_token_id = model.pad_choice.token_id
        logits = theirs(**model.tokenize(PROMPTS, [f"<new1> {text}" for text in RESPONSES])).logits[:, 0]
    rewards = model.score(PROMPTS, [f"<new1> {text}" for text in RESPONSES])
    torch.testing.assert_close(rewards, logits, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    merged = BradleyTerryRM.from_pretrained(tmp_path / "merged").score(PROMPTS, RESPONSES)
    torch.testing.assert_close(merged, model.score(PROMPTS, RESPONSES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1]},
        {"lora_bias": True},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"ensure_weight_tying": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:aLoRA", "ignore:`lora_bias=True`", "ignore:You have requested")
def test_adapters_of_peft_that_could_not_be_merged_are_refused_when_loaded(options: dict[str, Any], tmp_path: Path):
    made_by_peft(tmp_path, target_modules=["k_proj"], **options)
    (name,) = options
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {name} must be left at its default"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter", max_length=64)


@pytest.mark.parametrize("start", ["pissa", "olora", "gaussian", "orthogonal"])
def test_adapters_load_and_merge_whatever_their_factors_started_from(start: str, tmp_path: Path):
    theirs = made_by_peft(tmp_path, target_modules=["k_proj"], init_lora_weights=start)
    model = BradleyTerryRM.from_pretrained(tmp_path / "adapter", max_length=64)
    with torch.no_grad():
        theirs.base_model.model.config.pad_token_id = model.pad_choice.token_id
        logits = theirs(**model.tokenize(PROMPTS, RESPONSES)).logits[:, 0]
    rewards = model.score(PROMPTS, RESPONSES)
    torch.testing.assert_close(rewards, logits, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    merged = BradleyTerryRM.from_pretrained(tmp_path / "merged").score(PROMPTS, RESPONSES)
    torch.testing.assert_close(merged, rewards, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_two_labels_or_beside_whole_weights_is_refused_with_its_cause(tmp_path: Path):
    made_by_peft(tmp_path / "two", num_labels=2, target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"score\.weight of shape \[2, 32\] in place of \[1, 32\]"):
        BradleyTerryRM.from_pretrained(tmp_path / "two" / "adapter")
    made_by_peft(tmp_path / "one", target_modules=["q_proj"])
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "one" / "base" / name, tmp_path / "one" / "adapter")
    with pytest.raises(CheckpointError, match="holds an adapter and the weights of a whole model; keep one of them"):
        BradleyTerryRM.from_pretrained(tmp_path / "one" / "adapter")


def test_an_adapter_made_by_peft_alone_loads(tmp_path: Path):
    base_folder("llama", tmp_path / "base")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs = PeftModel(
        plain, LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(0.3) if "lora_B" in name or "score" in name else None
    theirs.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer("llama").save_pretrained(tmp_path / "adapter")
    model = BradleyTerryRM.from_pretrained(tmp_path / "adapter", max_length=64)
    with torch.no_grad():
        theirs.eval().config.pad_token_id = model.pad_choice.token_id
        logits = theirs(**model.tokenize(PROMPTS, RESPONSES)).logits[:, 0]
    torch.testing.assert_close(model.score(PROMPTS, RESPONSES), logits, rtol=1e-5, atol=1e-5)
    (tmp_path / "adapter" / "tokenizer_config.json").unlink()
    stored = adapter_files.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    torch.save(stored, tmp_path / "adapter" / "adapter_model.bin")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    older = BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(older.score(PROMPTS, RESPONSES), model.score(PROMPTS, RESPONSES))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_half_precision_base_keeps_head_side_and_factors_in_float32(family: str, tmp_path: Path):
    folder = base_folder(family, tmp_path / "base")
    model = BradleyTerryRM.from_pretrained(folder, max_length=64, dtype="bfloat16", new_head=True)
    add_adapter(model.model, LORA, seed=0)
    scrambled(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert dict(gradients(model))
    model.eval()
    assert save_adapter(model, tmp_path / "adapter").tolerance == 2.0**-4
    assert model.save_pretrained(tmp_path / "merged").is_passed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "lora", "alpha": 1.0, "dropout": 0.0}, "adapter.rank must be set with adapter.kind=lora, got null"),
        ({"kind": "lora", "rank": 0, "alpha": 1.0, "dropout": 0.0}, r"adapter.rank must be at least 1, got 0"),
        ({"kind": "lora", "rank": 8, "alpha": 1.0, "dropout": 1.0}, r"adapter.dropout must lie in \[0, 1\), got 1.0"),
        ({"rank": 8}, "adapter.rank must be null without an adapter .add adapter=lora., got 8"),
        ({"kind": "lora", "rank": 8, "alpha": 1.0, "dropout": 0.0, "targets": []}, "adapter.targets must name a layer"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**fields)


def test_four_bits_without_their_library_give_one_sentence(monkeypatch: pytest.MonkeyPatch):
    config = in_memory("llama").model.config
    monkeypatch.setattr("rm_optimizer.core.classifier.quantization.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"bitsandbytes is not installed; pip install 'rm-optimizer\[qlora\]'"):
        quantization_arguments(config)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_base_in_four_bits_trains_saves_merges_and_reloads(family: str, tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    tokenizer = tiny_tokenizer(family)
    tiny_model(family, tokenizer, hidden_size=64).base_model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    loaded = load_model(tmp_path / "base", LoadOptions(quantize=True, new_head=True))
    model = BradleyTerryRM(loaded.model, tokenizer=loaded.tokenizer, max_length=64, fresh_head_seed=0)
    qlora = AdapterConfig(kind=AdapterKind.qlora, rank=4, alpha=8.0, dropout=0.0)
    _, total, _, _ = counts(add_adapter(model.model, qlora, seed=0))
    assert is_quantized(model.model)
    assert total > sum(parameter.numel() for parameter in model.parameters())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    rewards = scrambled(model).score(PROMPTS, RESPONSES)
    assert save_adapter(model, tmp_path / "adapter").is_passed
    again = BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    assert is_quantized(again.model)
    again_rewards = again.score(PROMPTS, RESPONSES)  # without padding on a processor, unlike those of `model`
    torch.testing.assert_close(again_rewards, rewards)
    from_checkpoint = BradleyTerryRM.from_pretrained(lightning_checkpoint(model, tmp_path / "last.ckpt"))
    assert torch.equal(from_checkpoint.score(PROMPTS, RESPONSES), again_rewards)
    merges_exactly = not torch.cuda.is_available()  # a processor computes in float32
    assert model.save_pretrained(tmp_path / "merged").tolerance == (1e-4 if merges_exactly else 2.0**-2)
    assert not is_quantized(BradleyTerryRM.from_pretrained(tmp_path / "merged").model)


def test_an_unpacked_bias_can_be_loaded_after_scoring(monkeypatch: pytest.MonkeyPatch):
    """In four bits a pass in inference mode replaces the bias's data by a tensor that no state can be loaded from."""
    layer = torch.nn.Linear(4, 2).requires_grad_(False)
    with torch.inference_mode():
        layer.bias.data = layer.bias.data.to(torch.bfloat16).float()
    layer.weight.quant_state = SimpleNamespace(dtype=torch.float32)
    library = SimpleNamespace(dequantize_4bit=lambda weight, state: weight)
    monkeypatch.setattr("rm_optimizer.core.classifier.quantization.import_module", lambda name: library)
    loaded = torch.nn.Linear(4, 2)
    loaded.load_state_dict(unpacked(layer), assign=True)
    assert torch.equal(loaded.bias, layer.bias)
    assert not loaded.bias.is_inference()
