"""Parts of a multimodal classifier that text does not use: vision towers, projectors, their tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from transformers import PreTrainedModel

_log = logging.getLogger("rm_optimizer")


def parts_beside_text(model: PreTrainedModel) -> tuple[str, ...]:
    """Dotted names of the backbone's modules and parameters outside its text model; none if it reads text only."""
    return tuple(_beside(model, _text_model_name(model)))


def freeze_beside_text(model: PreTrainedModel) -> None:
    """Freeze and log the parts that text does not use, so that only parameters with a gradient count as trainable."""
    sizes = []
    for part in parts_beside_text(model):
        frozen = [p for name, p in model.named_parameters() if f"{name}.".startswith(f"{part}.")]
        for parameter in frozen:
            parameter.requires_grad_(False)
        if frozen:
            sizes.append(f"{part} ({sum(p.numel() for p in frozen):,} parameters)")
    if sizes:
        _log.info("only the text of %s is read; frozen: %s", type(model).__name__, ", ".join(sizes))


def _text_model_name(model: PreTrainedModel) -> str:
    """Dotted name of the text model inside a multimodal backbone; empty for a backbone that reads text only."""
    if model.config.get_text_config() is model.config:
        return ""
    embedding, prefix = model.get_input_embeddings(), f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        if name.startswith(prefix) and isinstance(module, PreTrainedModel) and embedding in module.modules():
            return str(name)
    return ""


def _beside(model: PreTrainedModel, text: str) -> Iterator[str]:
    """Modules that are not on the path from the backbone to its text model, poolers excluded."""
    steps = text.split(".")
    for depth in range(1, len(steps)):
        parent = ".".join(steps[:depth])
        module = model.get_submodule(parent)
        parts = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
        yield from (f"{parent}.{part}" for part in parts if part != steps[depth] and "pooler" not in part)
