"""A source without a trained reward head gives no rewards: it is refused wherever one scores, and may be trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertForMultipleChoice,
    PreTrainedModel,
)
from typer.testing import CliRunner

import rm_optimizer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import CheckpointError
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_config, tiny_model, tiny_tokenizer


def stored(model: PreTrainedModel, family: str, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer(family).save_pretrained(folder)
    return folder


def without(folder: Path, *names: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name not in names}
    assert len(kept) == len(tensors) - len(names)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def classifier(family: str, folder: Path) -> Path:
    return stored(tiny_model(family), family, folder)


CASES = {
    "a causal model": lambda f: stored(AutoModelForCausalLM.from_config(tiny_config("llama")), "llama", f),
    "a decoder's backbone": lambda f: stored(tiny_model("llama").base_model, "llama", f),
    "an encoder's backbone": lambda f: stored(tiny_model("roberta").base_model, "roberta", f),
    "a classifier without its head": lambda f: without(classifier("qwen2", f), "score.weight"),
    "a head without its dense layer": lambda f: without(
        classifier("roberta", f), "classifier.dense.weight", "classifier.dense.bias"
    ),
    "a head without its bias": lambda f: without(classifier("bert", f), "classifier.bias"),
    "an encoder without its pooler": lambda f: without(
        classifier("bert", f), "bert.pooler.dense.weight", "bert.pooler.dense.bias"
    ),
    "a classifier of single tokens": lambda f: without(
        stored(AutoModelForTokenClassification.from_config(tiny_config("llama", num_labels=1)), "llama", f),
        "score.bias",  # with it the weights that no classifier of sequences reads are named first
    ),
    "a model of multiple choice": lambda f: stored(BertForMultipleChoice(tiny_config("bert", num_labels=1)), "bert", f),
}


@pytest.mark.parametrize("case", CASES)
def test_a_source_without_a_trained_head_is_refused_and_may_be_trained(case: str, tmp_path: Path):
    folder = CASES[case](tmp_path / "model")
    with pytest.raises(CheckpointError, match="has no trained reward head") as caught:
        BradleyTerryRM.from_pretrained(folder)
    assert f"rm-opt train model.path={folder}" in str(caught.value)
    assert "\n" not in str(caught.value)
    BradleyTerryRM.from_pretrained(folder, new_head=True)


def test_shards_that_lack_the_head_are_refused_and_whole_ones_are_not(tmp_path: Path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "whole", max_shard_size="40KB")
    headless = {name: value for name, value in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(tmp_path / "torn", state_dict=headless, max_shard_size="40KB")
    for name in ("whole", "torn"):
        tiny_tokenizer("llama").save_pretrained(tmp_path / name)
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
    assert torch.equal(BradleyTerryRM.from_pretrained(tmp_path / "whole").reward_head.weight, model.score.weight)
    with pytest.raises(CheckpointError, match=r"lack score\.weight"):
        BradleyTerryRM.from_pretrained(tmp_path / "torn")


def test_an_adapter_whose_base_and_file_both_lack_a_head_side_layer_is_refused(tmp_path: Path):
    base = without(classifier("bert", tmp_path / "base"), "bert.pooler.dense.weight", "bert.pooler.dense.bias")
    for modules, is_whole in ((["classifier"], False), (["classifier", "pooler"], True)):
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        lora = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", modules_to_save=modules)
        adapter = tmp_path / f"adapter-{len(modules)}"
        PeftModel(plain, lora).save_pretrained(adapter)
        tiny_tokenizer("bert").save_pretrained(adapter)
        if is_whole:
            BradleyTerryRM.from_pretrained(adapter, max_length=64)
        else:
            with pytest.raises(CheckpointError, match=r"lack bert\.pooler\.dense\.bias"):
                BradleyTerryRM.from_pretrained(adapter, max_length=64)


@pytest.mark.parametrize(
    "command",
    [
        ("score", "--prompt", "a", "--response", "b"),
        ("evaluate", "--data", "pairs.jsonl"),
        ("doctor", "--data", "pairs.jsonl"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_refuses_a_causal_model(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    CASES["a causal model"](tmp_path / "causal")
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = CliRunner().invoke(app, [command[0], "causal", *command[1:]])
    assert result.exit_code != 0
    assert "has no trained reward head" in str(result.exception) + result.stderr


def test_training_alone_asks_for_a_new_head():
    root = Path(rm_optimizer.__file__).parent
    asking = [path for path in root.rglob("*.py") if re.search(r"new_head=True", path.read_text())]
    assert {str(path.relative_to(root)) for path in asking} == {
        "core/storage/loading.py",
        "errors.py",
        "training/preparation.py",
    }
