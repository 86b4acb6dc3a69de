"""Parts of a multimodal classifier that text does not use: vision towers, projectors, their tokens."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

_log = logging.getLogger("rm_optimizer")


def parts_beside_text(model: PreTrainedModel) -> tuple[str, ...]:
    """Dotted names of the backbone's modules and parameters outside its text model, poolers excluded.

    There are none in a model that reads text only.
    """
    if model.config.get_text_config() is model.config:
        return ()
    embedding, prefix = model.get_input_embeddings(), f"{model.base_model_prefix}."
    text_models = (
        str(name)
        for name, module in model.named_modules()
        if name.startswith(prefix) and isinstance(module, PreTrainedModel) and embedding in module.modules()
    )
    found, steps = list[str](), next(text_models, "").split(".")
    for depth in range(1, len(steps)):  # along the path from the backbone to its text model
        parent = ".".join(steps[:depth])
        module = model.get_submodule(parent)
        parts = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
        found += [f"{parent}.{part}" for part in parts if part != steps[depth] and "pooler" not in part]
    return tuple(found)


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
