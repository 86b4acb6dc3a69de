"""Scalar head: how it is found, made and trained, and the other parts of a classifier.

The modules on the head's side train in full with every adapter. A multimodal classifier also has parts that text does
not use: vision towers, projectors, their tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import HALF
from rm_optimizer.core.classifier.pooling import RewardHead
from rm_optimizer.errors import CheckpointError, ConfigError, needs_import, no_trained_head

REWARD_HEAD_PATTERNS = ("pooler",)
"""Parts of names of modules inside a backbone that belong to the reward head's side, as all modules after it do."""
_log = logging.getLogger("rm_optimizer")
OTHER_TASKS = ("ForTokenClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForQuestionAnswering")
"""Classes whose head `transformers` would load as a sequence classifier's, since it has the same name and shape."""

_HEADS = {
    r"v_head\.summary": "TRL's value head",
    r"value_head(?=\.(safetensors|bin))": "LLaMA-Factory's value head",
    r"value_head|reward_head": "OpenRLHF's value head",
    r"regression_head": "UltraRM's regression head",
    r"score_head": "Beaver's score head",
    r"v_head": "a value head",
    r"regression_layer|reward_transform_matrix|gating": "ArmoRM's mixture",
    r"score\.\d+": "a head of several layers",
    r"score|classifier|out_proj": "a classifier's head",
}
"""Published forms of reward heads, by the names of their tensors or files."""


def published_form(name: str) -> str | None:
    """Form of a head in words, by the name of its module, tensor or file; None for an unknown one.

    Example:
        >>> published_form("module.v_head.summary.weight")
        "TRL's value head"
    """
    return next((words for form, words in _HEADS.items() if re.search(rf"(^|\.)({form})(\.|$)", name)), None)


def head_name(model: PreTrainedModel) -> str:
    """Dotted name of the final linear layer: the one with a single output outside the backbone.

    Raises:
        CheckpointError: if there is no such layer, or more than one.
    """
    backbone = f"{model.base_model_prefix}."
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == 1 and not name.startswith(backbone)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"expected {type(model).__name__} to have one linear layer with one output after its backbone, "
            f"found {len(found)}; load it with num_labels=1"
        )
    return found[0]


def head_side_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Dotted names of the outermost modules with weights between the backbone's blocks and the reward.

    The final layer is among them, or inside one; so are the dense layers and norms before it and the backbone's pooler,
    which base checkpoints lack, so that they start at random values and must be trained and saved in full.
    """
    prefix = model.base_model_prefix
    inside = [f"{prefix}.{name}" for name, _ in model.base_model.named_children()]
    outside = [name for name, _ in model.named_children() if name != prefix]
    pooling = [name for name in inside if any(pattern in name for pattern in REWARD_HEAD_PATTERNS)]
    return tuple(name for name in [*pooling, *outside] if any(True for _ in model.get_submodule(name).parameters()))


def parts_beside_text(model: PreTrainedModel) -> tuple[str, ...]:
    """Dotted names of the backbone's modules and parameters outside its text model, poolers excluded.

    A model that reads text only has no such layers.
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


def require_trainable_head(model: PreTrainedModel) -> None:
    """Refuse to train a model whose reward head is frozen, so that its rewards would come from a random projection.

    Raises:
        ConfigError: if a parameter of the final linear layer does not require a gradient.
    """
    name = head_name(model)
    frozen = [key for key, parameter in model.get_submodule(name).named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"the reward head {name} must be trainable, but its {' and '.join(frozen)} "
            "requires no gradient; call requires_grad_(True) on model.reward_head"
        )


def require_trained_head(
    model: PreTrainedModel, drawn: Collection[str], source: object, unread: Collection[str] = ()
) -> None:
    """Refuse to score with a model whose rewards would come from a random projection.

    Args:
        model: model after loading.
        drawn: names of its weights that the source lacks.
        source: path or name of the model, for the message.
        unread: names of the stored weights that the model has no place for.

    Raises:
        CheckpointError: if the head has another form, weights were drawn at random, or the head's were trained
            for another task.
    """
    task = next((task for name in model.config.architectures or () for task in OTHER_TASKS if task in name), None)
    if drawn and unread:
        form = next(filter(None, map(published_form, sorted(unread))), "unknown")
        raise needs_import(
            source,
            f"it has a trained reward head in another form: {form}, stored as {', '.join(sorted(unread)[:3])}, where "
            f"{', '.join(sorted(drawn)[:3])} was expected (rm-opt train model.path={source} trains a new one)",
        )
    if drawn:
        lacks = f"its weights lack {', '.join(sorted(drawn)[:3])}, which would be random"
    elif task is not None:
        lacks = f"it was saved as {model.config.architectures[0]}, whose output is no reward of a whole response"
    else:
        return
    raise no_trained_head(source, lacks)


def keep_exact(module: nn.Module) -> None:
    """Convert a head-side module's half-precision weights to float32, and let its layers cast their inputs.

    Each layer with weights gets a hook that casts its floating inputs to the weights' type, so that a backbone in
    bfloat16 may feed it outside autocast.
    """
    if not any(parameter.dtype in HALF for parameter in module.parameters()):
        return
    module.float()
    for layer in module.modules():
        if not isinstance(layer, RewardHead) and any(True for _ in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(_cast_inputs)


def _cast_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(layer.parameters(recurse=False)).dtype
    return tuple(value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value for value in inputs)


def install_reward_head(model: PreTrainedModel) -> RewardHead:
    """Replace the final linear layer by a `RewardHead` with the same parameters, in float32 or better.

    Raises:
        CheckpointError: if the model has no single final layer with one output.
    """
    name = head_name(model)
    plain: nn.Linear = model.get_submodule(name)
    if isinstance(plain, RewardHead):
        return plain
    head = RewardHead(plain.in_features, 1, bias=plain.bias is not None, device="meta")
    for key, parameter in plain.named_parameters():
        exact = parameter.float() if parameter.dtype in HALF else parameter
        setattr(head, key, nn.Parameter(exact.detach(), requires_grad=parameter.requires_grad))
    model.set_submodule(name, head.train(plain.training))
    return head


def initialize_head(head: RewardHead, seed: int) -> str:
    """Draw a fresh head from N(0, 1 / (hidden + 1)) with zero bias, and return this in words.

    The second argument is read as the standard deviation, as OpenRLHF reads Stiennon et al. (2020, appendix B.2,
    https://arxiv.org/abs/2009.01325), who write "N(0, 1 / (d_model + 1))". Margins then start near zero, so the first
    loss is log 2; `transformers`' own N(0, 0.02) starts a model 4096 wide above chance.
    """
    std = 1.0 / (head.in_features + 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)
        if head.bias is not None:
            head.bias.zero_()
    return f"normal(mean=0, std=1/(hidden+1)={std:.6g}), seed={seed}"
