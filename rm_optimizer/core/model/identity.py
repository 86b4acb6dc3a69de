"""Digests by which results of the same model are recognized."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.records.codec import json_values

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM

_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version")


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the name and bytes of every parameter and buffer, in hexadecimal."""
    weights = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return weights.hexdigest()


def scorer_digest(model: BradleyTerryRM) -> str:
    """16 hexadecimal digits of everything that determines a reward: weights, configuration, rendering and length.

    It does not depend on the model's path, so that new weights under an old path are recognized.
    """
    return digest([weights_digest(model.model), *_reading(model)])


def reading_digest(model: BradleyTerryRM) -> str:
    """`scorer_digest` without the weights; models with the same one differ in weights only."""
    return digest([type(model.model).__name__, *_reading(model)])


def _reading(model: BradleyTerryRM) -> list[Any]:
    """Configuration, rendering and padding as JSON values."""
    config = json.loads(model.model.config.to_json_string(use_diff=False))
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    return [kept, model.renderer.identity(), json_values(model.pad_choice)]
