"""Folders of a reward model as other projects read them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.classifier.pooling import RewardHead, pooling_head_of, pools_last_token
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import merged_model
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.export import certified, replacing_export, save_export, stored_renderer
from rm_optimizer.errors import ConfigError, require_known

PROJECTS = {
    "trl": "TRL reads the plain classifier: GRPOTrainer(reward_funcs=FOLDER)",
    "openrlhf": "OpenRLHF reads the plain classifier: --reward.model_name_or_path FOLDER",
    "llama-factory": "LLaMA-Factory reads a causal model with value_head.safetensors: reward_model: FOLDER, "
    "reward_model_type: full",
    "vllm": "vLLM reads the plain classifier: vllm serve FOLDER --runner pooling, whose /classify gives raw rewards",
    "tei": "text-embeddings-inference reads the plain classifier: --model-id FOLDER --dtype float32, and /predict with "
    "raw_scores=true; it computes GELU by its tanh approximation",
}
"""Sentence on the use of a folder, by the name of the project."""
VALUE_HEAD_FILE = "value_head.safetensors"
_VLLM_ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
_TEI_ENCODERS = (*_VLLM_ENCODERS, "camembert", "distilbert", "deberta-v2")
_OF_CLASSIFIER = ("reward_head", "problem_type", "id2label", "label2id", "num_labels", "architectures", "auto_map")


def save_for(project: str, model: BradleyTerryRM, folder: Path) -> tuple[ParityCertificate, str]:
    """Write the folder that a project reads, with its certificate and a sentence on its use.

    Args:
        project: name among `PROJECTS`.
        model: the model; its head loses a constant that the project reads elsewhere.
        folder: folder to write.

    Raises:
        ConfigError: if the project is unknown or cannot read such a model.
        CheckpointError: if the folder cannot be written or scores otherwise.
    """
    require_known("--for", project, PROJECTS)
    if (obstacle := _obstacle(project, model)) is not None:
        raise ConfigError(f"{project} cannot read this model: {obstacle}")
    config, use = model.model.config, PROJECTS[project]
    if project == "llama-factory":
        return _with_value_head(model, folder), use
    settings: dict[str, Any] = {}
    if project == "trl" and hasattr(config, "reward_head"):
        use += ", GRPOConfig(trust_remote_code=True)"
    elif project == "openrlhf" and hasattr(config, "reward_head"):
        settings = {"value_head_prefix": "score", "normalize_reward": True, "mean": -_without_bias(model), "std": 1.0}
        use += " --reward.normalize_enable, which adds the head's constant"
    elif project == "tei" and config.model_type == "modernbert":
        settings = _earlier_names(config, model.tokenizer)
    return save_export(model, folder, settings=settings), use


def _obstacle(project: str, model: BradleyTerryRM) -> str | None:
    """Reason why a project cannot read a model; None if it can."""
    config, is_decoder = model.model.config, pools_last_token(model.model)
    described: Mapping[str, Any] = getattr(config, "reward_head", {})
    if (name := pooling_head_of(model.model)) is not None:
        return f"it has no pooling head '{name}'"
    if project == "trl":
        return None if model.tokenizer.chat_template else "it renders by a chat template, and the tokenizer has none"
    if "separator" in described and project in ("tei", "vllm"):
        return "it runs no code of the folder, which derives the token types of text pairs"
    if project == "tei":
        return None if config.model_type in _TEI_ENCODERS else f"its classifiers are {', '.join(_TEI_ENCODERS)}"
    if project == "vllm":
        if described:
            return "its reward heads are one linear layer, without a bias in a decoder"
        is_known = is_decoder or config.model_type in _VLLM_ENCODERS
        return None if is_known else f"its classifiers of encoders are {', '.join(_VLLM_ENCODERS)}"
    if not is_decoder or "marker" in described or len(described.get("sizes", ())) > 2:
        return "it reads one linear layer at the last token of a decoder"
    if project == "llama-factory" and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{config.model_type} has no causal model of text in transformers"
    return None


def _without_bias(model: BradleyTerryRM) -> float:
    """Take the constant out of a linear head, and return it."""
    head = model.reward_head
    constant = float(head.bias.detach())
    head.register_parameter("bias", None)
    del model.model.config.reward_head
    return constant


def _earlier_names(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Settings of ModernBERT under the names that they had before transformers 5, all of which the server reads."""
    rope, kinds = config.rope_parameters, [*config.layer_types, "full_attention"]
    return {
        "global_rope_theta": rope["full_attention"]["rope_theta"],
        "local_rope_theta": rope["sliding_attention"]["rope_theta"],
        "global_attn_every_n_layers": kinds.index("full_attention", 1),
        "bos_token_id": tokenizer.cls_token_id if config.bos_token_id is None else config.bos_token_id,
        "eos_token_id": tokenizer.sep_token_id if config.eos_token_id is None else config.eos_token_id,
    }


def _with_value_head(model: BradleyTerryRM, folder: Path) -> ParityCertificate:
    """Write a causal model, whose output layer is its embedding, and the head in another file."""
    head = model.reward_head
    classifier = merged_model(model.model) if has_adapter(model.model) else model.model
    config = copy.deepcopy(classifier.config)
    for name in _OF_CLASSIFIER:
        config.__dict__.pop(name, None)
    config.tie_word_embeddings = True  # its logits mean nothing, so no output layer is stored
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config)
    setattr(causal, causal.base_model_prefix, classifier.base_model)
    causal.tie_weights()
    bias = torch.zeros(1) if head.bias is None else head.bias
    weights: dict[str, Tensor] = {"v_head.summary.weight": head.weight, "v_head.summary.bias": bias}
    with replacing_export(folder) as aside:
        causal.save_pretrained(aside)
        stored = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        save_file(stored, aside / VALUE_HEAD_FILE, metadata={"format": "pt"})
        model.tokenizer.save_pretrained(aside)
        reloaded = AutoModelForSequenceClassification.from_pretrained(aside, num_labels=1)
        reloaded.score = RewardHead(head.in_features, 1)
        read = load_file(aside / VALUE_HEAD_FILE)
        reloaded.score.load_state_dict({name.rpartition(".")[2]: value for name, value in read.items()})
        return certified(model, stored_renderer(model, aside), reloaded)
