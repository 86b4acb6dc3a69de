"""Models in a form that vLLM loads: the folder of a plain classifier, and an exchangeable adapter."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rm_optimizer.core.classifier.adapters import ADAPTER_NAME, has_adapter, lora_config
from rm_optimizer.core.classifier.building import LoadOptions, new_classifier, read_config
from rm_optimizer.core.classifier.head import require_trained_head
from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import write_adapter
from rm_optimizer.core.storage.loading import refuse_unread
from rm_optimizer.core.storage.model_files import read_record, require_exported_weights
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.accelerator import fastest_device
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import SourceKind, resolve_source
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import EngineDescription
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.weights.live_weights import checkpoint_version, tensor_specs
from rm_optimizer.serving.weights.weight_file import tensor_files

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s that `--engine auto` serves with vLLM: causal decoders that it pools at the last token."""


@dataclass(frozen=True)
class VllmModel:
    """Model in the form that vLLM loads.

    Args:
        folder: folder of a classifier with one label and its tokenizer.
        adapter: folder of the served LoRA adapter, in peft's form; None serves the classifier alone.
        rank: rank of the adapter; 0 without one.
        description: description of the model without its token budget.
    """

    folder: Path
    adapter: Path | None
    rank: int
    description: EngineDescription


_MODEL = TypeAdapter(VllmModel)


def shared_model(options: WorkerOptions) -> VllmModel:
    """Model of the worker's folder for vLLM, which the worker with a tokenizer folder prepares for all others.

    Raises:
        RMOptimizerError: if it cannot be loaded or exported.
    """
    work = Path(options.vllm_folder)
    file = work / "model.json"
    if options.tokenizer_folder:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_text(file, _MODEL.dump_json(prepare_model(options.checkpoint, work, options.dtype)).decode())
    model = _MODEL.validate_json(file.read_bytes())
    if model.adapter is None:
        require_unchanged(model)
    return model


def suits_vllm(checkpoint: str) -> bool:
    """True for a folder with a decoder of `FAMILIES`; the transformers engine serves all others."""
    source = resolve_source(checkpoint)
    if source.kind is not SourceKind.FOLDER:
        return False
    config = read_config(source.location, LoadOptions())
    return config.model_type in FAMILIES and not hasattr(config, "reward_head")


def prepare_model(checkpoint: str, work: Path, dtype: str) -> VllmModel:
    """Find the folder that vLLM can load, or write one.

    A folder written by `rm-opt export` is loaded directly. An adapter is served on its base, so that it can be
    exchanged alone. Anything else is exported first.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        work: folder for an exported model.
        dtype: type that vLLM computes in.

    Raises:
        RMOptimizerError: if it cannot be loaded or exported.
    """
    if (folder := _export_of_ours(checkpoint)) is not None:
        return _from_files(folder, dtype)
    disable_progress_bar()
    reward_model = BradleyTerryRM.from_pretrained(checkpoint)
    if not has_adapter(reward_model.model):
        reward_model.save_pretrained(work / "model")
        return _from_files(work / "model", dtype)
    model = reward_model.model
    if is_quantized(model):
        raise CheckpointError(
            "vLLM cannot exchange an adapter on a base in four bits; export the merged model, or serve it with "
            "--engine transformers"
        )
    base, adapter = work / "base", work / "adapter"
    _base_classifier(model).save_pretrained(base)
    reward_model.tokenizer.save_pretrained(base)
    adapter.mkdir()
    write_adapter(model, adapter)
    record = read_record(Path(checkpoint).expanduser())
    description = _describe(model, base, dtype, reward_model.renderer.identity(), record)
    return VllmModel(base, adapter, lora_config(model).r, description)


def require_unchanged(model: VllmModel) -> None:
    """Compare the files that vLLM loads with those that were prepared.

    Raises:
        CheckpointError: if the folder was replaced, damaged or removed.
    """
    if _export_of_ours(str(model.folder)) is None:
        raise CheckpointError(f"expected the export that is served in {model.folder}; it was replaced or removed")
    model.description.require_same(_from_files(model.folder, model.description.dtype).description, model.folder)


def _export_of_ours(checkpoint: str) -> Path | None:
    """Folder of the checkpoint, if `rm-opt export` wrote it."""
    source = resolve_source(checkpoint)
    folder = Path(source.location)
    is_export = source.kind is SourceKind.FOLDER and "certificate" in read_record(folder)
    return folder.resolve() if is_export and any(folder.glob("*.safetensors")) else None


def _from_files(folder: Path, dtype: str) -> VllmModel:
    """Description from the folder's configuration and `export.json`; the weights are read, not loaded.

    Raises:
        CheckpointError: if the weights are not those that were exported, or some are missing or not read.
    """
    record = read_record(folder)
    require_exported_weights(folder, record)
    with torch.device("meta"):
        skeleton = new_classifier(read_config(str(folder), LoadOptions()))
    read, stored = skeleton.state_dict().keys(), tensor_files(map(str, folder.glob("*.safetensors"))).keys()
    require_trained_head(skeleton, read - stored, folder)
    refuse_unread(skeleton, stored - read, is_fresh=False)
    return VllmModel(folder, None, 0, _describe(skeleton, folder, dtype, record["identity"]["template"], record))


def _base_classifier(model: PreTrainedModel) -> PreTrainedModel:
    """Plain classifier of the adapted model's frozen weights and its head; the tensors are shared, not copied."""
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ADAPTER_NAME not in name.split(".")
    }
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(model.config)
    plain.load_state_dict(state, assign=True)
    return plain


def _describe(
    model: PreTrainedModel, folder: Path, dtype: str, identity: Mapping[str, Any], record: Mapping[str, Any]
) -> EngineDescription:
    """Description of a classifier whose files are in a folder, or of an adapted one on the base in the folder."""
    if (name := getattr(model.config, "pooling_head", None)) is not None:
        raise CheckpointError(f"vLLM has no pooling head '{name}'; serve the model with --engine transformers")
    if hasattr(model.config, "reward_head"):
        raise CheckpointError(
            "vLLM has no reward head but one linear layer without a bias, and gives every token type 0; serve the "
            "model with --engine transformers"
        )
    is_adapted = has_adapter(model)
    whole = RewardModelTrainingMode.lora if is_adapted else RewardModelTrainingMode.full
    return EngineDescription(
        engine="vllm",
        architecture=type(model).__name__,
        dtype=dtype,
        device=fastest_device().type,
        version=checkpoint_version(model, None, {}) if is_adapted else checkpoint_version(model, folder, record),
        max_length=identity["max_length"],
        vocab_size=model.get_input_embeddings().weight.shape[0],
        token_budget=1,
        shares_prompts=True,
        pad_token_id=model.config.get_text_config().pad_token_id,
        tensors={mode: tensor_specs(model, mode) for mode in (whole, RewardModelTrainingMode.head_only)},
        tokenizer_folder=str(folder),
        identity=identity,
        export=record,
    )
