"""What a large base needs: weights in bfloat16, and checkpoints that leave the base out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.importing.exporting import export_reward_model
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.storage.adapter_files import adapter_tensor_names, separate_base
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.core.storage.loading import PAYLOAD_KEY, checkpoint_payload, read_checkpoint
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.padding import PackedTrees
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.evaluation.pair_rewards import shares_prefixes
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.config import PrefixSharing
from rm_optimizer.training.preparation import trainable_model
from rm_optimizer.training.run import run_training
from tests.builders import tiny_model, tiny_tokenizer
from tests.serving.engines import InProcessEngine, client_of, options_of, served

FEW = (
    "data.synthetic.num_train=32",
    "data.synthetic.num_val=8",
    "batching.batch_size=8",
    "training.checkpoint_every=2",
)
TEXTS = (["Why?", "Say more."], ["Because it is so.", "No."])


def base_folder(folder: Path, family: str = "llama", seed: int = 0, **fields: int) -> Path:
    tokenizer = tiny_tokenizer(family)
    tiny_model(family, tokenizer, seed=seed, **fields).base_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(small_overrides: list[str]) -> Callable[..., TrainConfig]:
    others = [line for line in small_overrides if not line.startswith("model.")]

    def build(folder: Path, base: Path, *options: str) -> TrainConfig:
        own = [
            "model=custom",
            f"model.path={base}",
            "model.max_length=64",
            f"output_dir={folder}",
            "training.checkpoint_every=2",
        ]
        return typed(compose([*others, *FEW, *own, *options]), TrainConfig)

    return build


def test_checkpoints_of_an_adapter_leave_its_base_out_and_continue_to_the_same_numbers(config, tmp_path):
    base = base_folder(tmp_path / "base")
    whole = run_training(config(tmp_path / "whole", base, "adapter=lora"))
    run = RunFolder(tmp_path / "whole")
    names = adapter_tensor_names(BradleyTerryRM.from_pretrained(run.best_checkpoint).model)
    for path in (run.best_checkpoint, *run.checkpoints.values()):
        assert read_checkpoint(path)[1].keys() == names
    merged = BradleyTerryRM.from_pretrained(whole.export).score(*TEXTS)
    assert torch.allclose(BradleyTerryRM.from_pretrained(run.best_checkpoint).score(*TEXTS), merged, atol=1e-5)

    run_training(config(tmp_path / "parts", base, "adapter=lora", "training.max_steps=2"))
    resumed = run_training(config(tmp_path / "parts", base, "adapter=lora", "resume=auto"))
    assert resumed.metrics.nll.value == whole.metrics.nll.value

    base_folder(base, seed=1)
    with pytest.raises(CheckpointError, match=r"belongs to other weights than .*base holds now"):
        BradleyTerryRM.from_pretrained(run.best_checkpoint)
    with pytest.raises(CheckpointError, match=r"an adapter of other weights than .*base holds now"):
        run_training(config(tmp_path / "parts", base, "adapter=lora", "resume=auto", "training.epochs=2"))


def test_a_checkpoint_that_holds_the_base_is_read_without_it(tmp_path):
    model = BradleyTerryRM.from_pretrained(base_folder(tmp_path / "base"), new_head=True)
    add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0), seed=0)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, PAYLOAD_KEY: checkpoint_payload(model)}, tmp_path / "whole.ckpt")
    base_folder(tmp_path / "base", seed=1)
    assert torch.equal(BradleyTerryRM.from_pretrained(tmp_path / "whole.ckpt").score(*TEXTS), model.score(*TEXTS))


def test_a_base_in_four_bits_trains_on_a_processor_and_is_exported_merged_and_served(config, tmp_path):
    base = base_folder(tmp_path / "base", hidden_size=64)
    result = run_training(config(tmp_path / "run", base, "adapter=qlora"))
    trained = BradleyTerryRM.from_pretrained(RunFolder(tmp_path / "run").best_checkpoint)
    assert is_quantized(trained.model)
    rewards = trained.score(*TEXTS)
    record = json.loads((Path(result.export) / "export.json").read_text(encoding="utf-8"))
    assert record["certificate"]["relative_difference"] < 1e-4
    merged = export_reward_model(str(tmp_path / "run"), tmp_path / "merged").folder
    factors = export_reward_model(str(tmp_path / "run"), tmp_path / "adapter", adapter_only=True).folder
    for folder in (result.export, merged, factors):
        assert torch.allclose(BradleyTerryRM.from_pretrained(str(folder)).score(*TEXTS), rewards, atol=1e-4)

    async def served_rewards(folder: Path) -> list[float]:
        app = await served(InProcessEngine(options_of(folder, tmp_path / "tokenizer")))
        async with client_of(app) as client:
            items = [{"prompt": prompt, "responses": [response]} for prompt, response in zip(*TEXTS, strict=True)]
            answer = await client.post("/rm/score", json={"items": items})
        return [row[0] for row in answer.json()["rewards"]]

    assert asyncio.run(served_rewards(Path(merged))) == pytest.approx(rewards.tolist(), abs=1e-4)


@pytest.mark.parametrize(("family", "how"), [("llama", "adapter=lora"), ("roberta", "model.freeze=backbone")])
def test_frozen_weights_in_bfloat16_train_the_rest_in_float32(config, tmp_path, family, how):
    base, losses = base_folder(tmp_path / "base", family), {}
    for dtype in ("float32", "bfloat16"):
        options = config(tmp_path / dtype, base, how, "optimizer.lr=1e-2", f"model.dtype={dtype}")
        parameters = list(trainable_model(options, PreferenceDataset([])).parameters())
        assert {each.dtype for each in parameters if each.requires_grad} == {torch.float32}
        assert {each.dtype for each in parameters if not each.requires_grad} == {getattr(torch, dtype)}
        losses[dtype] = run_training(options).metrics.nll.value
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.02)
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_prompts_are_shared_by_half_weights_unless_the_mask_is_wrong(tmp_path, monkeypatch, is_wrong):
    folder = base_folder(tmp_path / "base", hidden_size=64)
    model = BradleyTerryRM.from_pretrained(folder, new_head=True, dtype="bfloat16")
    pairs = [PreferencePair(f"Name number {i}.", f"It is {i} and more.", f"It is {i * i}!") for i in range(8)]
    tokens = tokenize_pairs(pairs, model.renderer, None)
    if is_wrong:  # as if the second branch saw the first
        monkeypatch.setattr("rm_optimizer.core.classifier.tree_masks.tree_mask", causal_mask)
    assert shares_prefixes(model, tokens, PrefixSharing.auto) is not is_wrong


def causal_mask(trees: PackedTrees, window: int | None) -> torch.Tensor:
    rows, tokens = trees.input_ids.shape
    return torch.ones(rows, 1, tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.slow
def test_every_weight_in_bfloat16_trains_as_in_float32_and_continues_to_the_same_numbers(config, tmp_path):
    base, found = base_folder(tmp_path / "base"), {}
    for dtype in ("float32", "bfloat16"):
        options = config(tmp_path / dtype, base, f"model.dtype={dtype}", "optimizer.lr=1e-3", "training.epochs=2")
        found[dtype] = run_training(options)
    nll = {dtype: result.metrics.nll.value for dtype, result in found.items()}
    assert nll["bfloat16"] == pytest.approx(nll["float32"], abs=0.02)
    exported = load_file(Path(found["bfloat16"].export) / "model.safetensors")
    assert {name for name, each in exported.items() if each.dtype != torch.bfloat16} == {"score.weight"}
    parts = [base, "model.dtype=bfloat16", "optimizer.lr=1e-3", "training.epochs=2"]
    run_training(config(tmp_path / "parts", *parts, "training.max_steps=2"))
    assert run_training(config(tmp_path / "parts", *parts, "resume=auto")).metrics.nll.value == nll["bfloat16"]


def test_some_layers_in_bfloat16_train_while_others_stay(config, tmp_path):
    base = base_folder(tmp_path / "base")
    options = config(tmp_path / "run", base, "model.dtype=bfloat16", "model.freeze=1", "optimizer.lr=1e-3")
    before = trainable_model(options, PreferenceDataset([])).model.state_dict()
    run_training(options)
    after = read_checkpoint(max(RunFolder(tmp_path / "run").checkpoints.items())[1])[1]
    changed = {name.split(".")[2] for name in before if ".layers." in name and not before[name].equal(after[name])}
    assert changed == {"1"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("adapter=qlora",), "be float32 with adapter=qlora"),
        (("hardware.devices=2",), "be float32 with several devices"),
        (("hardware=fsdp",), "be float32 with several devices"),
    ],
)
def test_half_weights_are_refused_where_they_are_packed_or_their_gradients_summed(config, tmp_path, options, says):
    with pytest.raises(ConfigError, match=rf"model\.dtype must {says}"):
        config(tmp_path, tmp_path, "model.dtype=bfloat16", *options)


def test_an_optimizer_that_half_weights_would_change_is_refused_before_the_model_is_loaded(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"optimizer=sam does not go with model\.dtype=bfloat16: it steps all weights"
    ):
        run_training(config(tmp_path / "run", tmp_path, "model.dtype=bfloat16", "optimizer=sam"))


def test_a_checkpoint_holds_the_embeddings_that_an_adapter_brought(tmp_path):
    """peft stores a smaller table where tokens were added, so that the base's own table is another one."""
    base = base_folder(tmp_path / "base")
    model = BradleyTerryRM.from_pretrained(base, new_head=True)
    config = AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0)
    add_adapter(model.model, config, seed=0)
    assert separate_base(model.model) is not None
    save_adapter(model, tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    table = model.model.get_input_embeddings().weight.detach()
    rows = torch.randn(len(table), table.shape[1])
    save_file(
        weights | {"base_model.model.model.embed_tokens.weight": rows}, tmp_path / "adapter/adapter_model.safetensors"
    )
    (tmp_path / "adapter/export.json").unlink()  # as plain peft writes it
    brought = BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    assert separate_base(brought.model) is None
    state = {f"model.{name}": value for name, value in brought.state_dict().items()}
    torch.save({"state_dict": state, PAYLOAD_KEY: checkpoint_payload(brought)}, tmp_path / "last.ckpt")
    assert torch.equal(BradleyTerryRM.from_pretrained(tmp_path / "last.ckpt").score(*TEXTS), brought.score(*TEXTS))
