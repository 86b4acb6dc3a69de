"""Digests by which results of the same model are recognized, and its rendering."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rm_optimizer.core.classifier.scoring import ClassifierRewardModel
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import json_values

_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version")
_OF_THE_FILE = ("architectures", "dtype", "use_cache")
_OF_ADAPTERS = ("r", "lora_alpha", "use_rslora", "use_dora")


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the name and bytes of every parameter and buffer, in hexadecimal."""
    return tensors_digest(dict([*model.named_parameters(), *model.named_buffers()]))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the name and bytes of every tensor, in hexadecimal."""
    weights = hashlib.sha256()
    for name, tensor in tensors.items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return weights.hexdigest()


def scorer_digest(model: ClassifierRewardModel) -> str:
    """16 hexadecimal digits of everything that determines a reward: weights, configuration, rendering and length.

    It does not depend on the model's path, so that new weights under an old path are recognized.
    """
    return digest([weights_digest(model.model), *_reading(model)])


def reading_digest(model: ClassifierRewardModel) -> str:
    """`scorer_digest` without the weights; models with the same one differ in weights only."""
    return digest([type(model.model).__name__, *_reading(model)])


def differing_settings(model: ClassifierRewardModel, other: ClassifierRewardModel) -> list[str]:
    """Names of the settings by which equal weights and tokens give other rewards or other tokens, sorted.

    Lengths, dropout and the type of the weights do not count.
    """
    own, others = _settings(model), _settings(other)
    return sorted(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))


def _settings(model: ClassifierRewardModel) -> dict[str, Any]:
    """Configuration, adapter, rendering and padding by name."""
    config, *_ = _reading(model)
    adapters: Mapping[str, Any] = getattr(model.model, "peft_config", {})
    scales = {f"{name} of the adapter": getattr(each, name) for each in adapters.values() for name in _OF_ADAPTERS}
    kept = {name: value for name, value in config.items() if "drop" not in name and name not in _OF_THE_FILE}
    return kept | scales | {"tokenizer or template": model.renderer.template_hash, "padding": model.pad_choice}


def _reading(model: ClassifierRewardModel) -> list[Any]:
    """Configuration, rendering and padding as JSON values."""
    config = json.loads(model.model.config.to_json_string(use_diff=False))
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    return [kept, model.renderer.identity(), json_values(model.pad_choice)]


def require_rendering(renderer: ConversationRenderer, stored: Mapping[str, Any]) -> None:
    """Compare a renderer with the `identity` of the one in training; `max_length` may differ.

    Raises:
        CheckpointError: if conversations are rendered or tokenized differently than in training.
    """
    if stored.get("template_hash") == renderer.template_hash:
        return
    if stored.get("kind") == "custom" and renderer.kind != "custom":
        raise CheckpointError("the model was trained with a custom render_fn; pass the same one as render_fn")
    raise CheckpointError(
        f"the model was trained with rendering {stored.get('template_hash')}, but its tokenizer now gives "
        f"{renderer.template_hash}: the probe reads {renderer.probe_rendering!r} instead of "
        f"{stored.get('rendering')!r}; restore the tokenizer and chat template that were saved with the model"
    )
