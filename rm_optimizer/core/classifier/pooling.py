"""Pooling of a decoder at the last attended token, independent of the pad id and the padding side."""

from __future__ import annotations

import inspect

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import attention_masks
from rm_optimizer.core.tokens.prefix_trees import PackedTrees


def pools_last_token(model: PreTrainedModel) -> bool:
    """True if the classifier is a decoder: a plain linear `score` applied to each token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear)


def last_attended(attention_mask: Int[Tensor, "sequences tokens"]) -> Int[Tensor, " sequences"]:
    """Index of each sequence's last token whose mask is not zero, for padding on either side.

    Raises:
        ValueError: if a sequence attends to nothing.

    Example:
        >>> last_attended(torch.tensor([[1, 1, 0], [0, 1, 1]]))
        tensor([1, 2])
    """
    counted = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device) * (attention_mask != 0)
    last = counted.amax(dim=1) - 1
    if bool((last < 0).any()):
        raise ValueError("attention_mask must attend to at least one token in every sequence, got a row of zeros")
    return last


def mask_position_ids(attention_mask: Int[Tensor, "sequences tokens"]) -> Int[Tensor, "sequences tokens"]:
    """Position of each token among the attended ones of its sequence, so that padding shifts no position.

    Example:
        >>> mask_position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 2]])
    """
    return ((attention_mask != 0).long().cumsum(dim=1) - 1).clamp(min=0)


def last_token_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
) -> Float[Tensor, "sequences 1"]:
    """A decoder's `score` at each sequence's last attended token.

    The backbone runs without cache or language-model head, and the head sees one vector of each sequence. Position ids
    follow the mask where the backbone takes them, which makes left padding exact for absolute positions too.
    `transformers` itself pools the rightmost token that is not the pad id, which is wrong where pad and EOS coincide.

    Raises:
        ValueError: if a sequence attends to nothing.
    """
    last = last_attended(attention_mask)
    backbone = model.base_model
    accepted = inspect.signature(backbone.forward).parameters
    extra = {"position_ids": mask_position_ids(attention_mask)} if "position_ids" in accepted else {}
    hidden = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **extra).last_hidden_state
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    logits: Tensor = model.score(hidden[rows, last.to(hidden.device)])
    return logits


def packed_logits(model: PreTrainedModel, packed: PackedTrees) -> Float[Tensor, "sequences 1"]:
    """A decoder's `score` at the last token of each sequence of the trees, whose shared tokens are computed once."""
    masks = attention_masks(packed, model.config.get_text_config(), model.dtype)
    backbone = model.base_model
    hidden = backbone(
        input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=masks, use_cache=False
    ).last_hidden_state
    logits: Tensor = model.score(hidden.flatten(0, 1)[packed.last])
    return logits


def own_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
) -> Float[Tensor, "sequences 1"]:
    """An encoder's logits through its own forward pass; encoders read the first token, so padding is on the right.

    Raises:
        ValueError: if a sequence does not start with an attended token.
    """
    if not bool((attention_mask[:, 0] != 0).all()):
        raise ValueError(
            f"{type(model).__name__} reads the first token, so attention_mask must start with 1 in every sequence; "
            "pad on the right"
        )
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask).logits
    return logits
