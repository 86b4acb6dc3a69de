"""Weights that were changed after the export are refused by whoever loads the folder, and unchanged ones are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage import model_files
from rm_optimizer.core.storage.adapter_files import base_of
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.core.storage.model_files import weight_digests
from rm_optimizer.errors import CheckpointError
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.serving.embedded.vllm_model import prepare_model
from tests.builders import tiny_reward_model

PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?"], ["Hello.", "4"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "best"
    tiny_reward_model("llama", max_length=77).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "run" / "best"))


def changed(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path, metadata={"format": "pt"})


def forget(folder: Path, entry: str) -> None:
    record = json.loads((folder / "export.json").read_text())
    (folder / "export.json").write_text(json.dumps({k: v for k, v in record.items() if k != entry}))


def one_row(weight: torch.Tensor) -> torch.Tensor:
    """The embedding of a token that no probe holds, moved."""
    row = torch.zeros_like(weight)
    row[2] = 1.0
    return weight + row


def test_a_copied_export_loads_and_its_files_are_recorded(folder: Path):
    record = json.loads((folder / "export.json").read_text())
    assert record["weights"] == weight_digests(folder)
    assert list(record["weights"]) == ["model.safetensors"]
    assert BradleyTerryRM.from_pretrained(folder.parent).max_length == 77


@pytest.mark.parametrize(
    ("name", "change"),
    [("score.weight", torch.neg), ("model.embed_tokens.weight", one_row), ("model.norm.weight", lambda w: w + 1e-7)],
)
@pytest.mark.parametrize("is_run_folder", [True, False])
def test_any_changed_weight_is_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], is_run_folder: bool, folder: Path
):
    changed(folder / "model.safetensors", name, change)
    source = folder.parent if is_run_folder else folder
    for options in ({}, {"new_head": True}):
        with pytest.raises(
            CheckpointError, match=r"not those that were exported: model\.safetensors changed"
        ) as caught:
            BradleyTerryRM.from_pretrained(source, **options)
    assert "delete its export.json and export the model again" in str(caught.value)
    with pytest.raises(CheckpointError, match="not those that were exported"):
        prepare_model(str(source), folder.parent / "work", "float32")


def test_a_weight_file_that_was_added_or_divided_is_refused(folder: Path):
    save_file({"score.weight": torch.zeros(1, 32)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors changed"):
        BradleyTerryRM.from_pretrained(folder)


def test_chunks_in_another_order_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_files, "_CHUNK_BYTES", 4)
    found = set()
    for content in (b"aaaabbbbcc", b"bbbbaaaacc", b"aaaabbbbc", b"aaaabbbbccc", b""):
        (tmp_path / "model.safetensors").write_bytes(content)
        found |= set(weight_digests(tmp_path).values())
    assert len(found) == 5


def test_an_export_without_digests_is_held_to_its_certified_rewards(folder: Path):
    forget(folder, "weights")
    BradleyTerryRM.from_pretrained(folder)
    changed(folder / "model.safetensors", "score.weight", torch.neg)
    with pytest.raises(CheckpointError, match="does not give the rewards that its certificate states"):
        BradleyTerryRM.from_pretrained(folder)


def test_an_export_without_digests_and_without_its_head_is_refused_by_both_engines(folder: Path):
    forget(folder, "weights")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="has no trained reward head"):
        BradleyTerryRM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="has no trained reward head"):
        prepare_model(str(folder), folder.parent / "work", "float32")


def test_a_layer_that_the_configuration_leaves_out_is_refused_by_both_engines(folder: Path):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    for load in (BradleyTerryRM.from_pretrained, lambda path: prepare_model(str(path), path / "work", "float32")):
        with pytest.raises(CheckpointError, match=r"does not read, among them model\.layers\.1"):
            load(folder)


def test_a_changed_configuration_is_seen_in_the_rewards(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match=r"weights or config\.json were changed"):
        BradleyTerryRM.from_pretrained(folder)


def test_a_changed_adapter_is_refused(exported: Path, tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(exported)
    add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0), seed=0)
    save_adapter(model, tmp_path / "adapter")
    BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    name = "base_model.model.score.weight"
    changed(tmp_path / "adapter" / "adapter_model.safetensors", name, lambda weight: weight * 1.001)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors changed"):
        BradleyTerryRM.from_pretrained(tmp_path / "adapter")


@pytest.fixture
def snapshot(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of `owner/name` in the hub's cache, at the commit of zeros that `main` and `v1` name."""
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return Path(shutil.copytree(exported, repository / "snapshots" / ("0" * 40)))


@pytest.mark.parametrize("revision", [None, "v1"])
def test_an_adapter_on_a_base_of_the_hub_records_its_commit(snapshot: Path, revision: str | None):
    model = BradleyTerryRM.from_pretrained("owner/name", revision=revision)
    add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0), seed=0)
    assert (base_of(model.model).source, base_of(model.model).revision) == ("owner/name", "0" * 40)
    assert "_commit_hash" not in model.model.config.to_dict()


def test_an_export_on_the_hub_keeps_its_identity_and_its_certificate(exported: Path, snapshot: Path):
    loaded = BradleyTerryRM.from_pretrained("owner/name")
    assert loaded.max_length == 77
    assert loaded.identity() == BradleyTerryRM.from_pretrained(exported).identity()
    changed(snapshot / "model.safetensors", "model.embed_tokens.weight", one_row)
    with pytest.raises(CheckpointError, match="not those that were exported"):
        BradleyTerryRM.from_pretrained("owner/name")
