"""Attention masks of prefix trees, and the decoders that take them.

A token of a tree attends to its prefix and to its branch alone, so that sequences with a common start share its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import KERNELS, takes_blocks
from rm_optimizer.core.tokens.padding import PackedTrees

LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers, as configurations list them, whose masks are known."""


def tree_mask(packed: PackedTrees, window: int | None = None) -> Bool[Tensor, "rows 1 tokens tokens"]:
    """Mask of the keys (last axis) that each query attends to: its own prefix and branch, backwards, in the window.

    Padding attends to padding, so that no row of the softmax is empty.

    Args:
        packed: the rows.
        window: sliding-window width in positions, or None.
    """
    tokens = packed.input_ids.shape[1]
    query = torch.arange(tokens, dtype=packed.end.dtype, device=packed.end.device)[:, None]
    allowed = (query < packed.end[:, None, :]).logical_and_(query >= query.T)
    if window is not None:
        position = packed.position_ids.to(packed.end.dtype)
        allowed &= position[:, :, None] - position[:, None, :] < window
    return allowed[:, None]


def tree_mask_mod(packed: PackedTrees, window: int | None = None) -> Callable[..., Tensor]:
    """`tree_mask` as a rule over row, head, query and key, which FlexAttention compiles into its kernel.

    Nothing but the window is a number in it, so that rows of another width need no other kernel.
    """
    end, position = packed.end, packed.position_ids
    if window is None:
        return lambda row, head, query, key: (query >= key) & (query < end[row, key])
    return lambda row, head, query, key: (
        (query >= key) & (query < end[row, key]) & (position[row, query] - position[row, key] < window)
    )


def tree_block_mask(packed: PackedTrees, window: int | None = None) -> BlockMask:
    """`tree_mask` for FlexAttention, which skips the blocks where it is empty."""
    rows, tokens = packed.input_ids.shape
    rule = tree_mask_mod(packed, window)
    return create_block_mask(rule, rows, None, tokens, tokens, device=str(packed.end.device))


def attention_masks(packed: PackedTrees, config: Any, dtype: torch.dtype) -> Any:
    """The mask in the form the model's layers take: one for all of them, or a dict with one for each kind.

    Args:
        packed: the rows.
        config: the text model's configuration; its kernel is one of `KERNELS`.
        dtype: type of the additive mask for eager attention.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = {kind: window if kind == "sliding_attention" else None for kind in kinds} or {"": window}
    kernel, masks = config._attn_implementation, dict[str, Tensor | BlockMask]()
    for kind, width in windows.items():
        if takes_blocks(kernel, packed.end.device):
            masks[kind] = tree_block_mask(packed, width)
            continue
        mask = tree_mask(packed, width)
        if kernel == "eager":
            lowest, zeros = torch.finfo(dtype).min, torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = zeros.masked_fill_(~mask, lowest)
        masks[kind] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def one_row(packed: PackedTrees, config: Any) -> tuple[dict[str, Any], Int[Tensor, " sequences"]]:
    """All trees in one row without padding: arguments of a backbone with the kernel `UNPADDED`, and the last tokens.

    Args:
        packed: the rows, on the CPU.
        config: the text model's configuration.
    """
    width = packed.input_ids.shape[1]
    row, column = packed.last // width, packed.last % width
    used = torch.zeros(len(packed.input_ids), dtype=torch.long).scatter_reduce(0, row, column + 1, "amax")
    places = (torch.arange(width) < used[:, None]).flatten().nonzero()[:, 0]
    ids, positions, end = (each.flatten()[places] for each in (packed.input_ids, packed.position_ids, packed.end))
    starts = (positions == 0).nonzero()[:, 0]
    sizes = starts.diff(append=starts.new_tensor([len(places)]))
    inside = torch.arange(int(sizes.max()))
    of_tree = (starts[:, None] + inside).clamp(max=len(places) - 1)
    reach = (end - places % width)[of_tree] + inside  # first column of the tree that does not attend to the token
    end = reach.where(inside < sizes[:, None], 0).to(packed.end.dtype)
    trees = replace(packed, input_ids=ids[of_tree], position_ids=positions[of_tree], end=end)
    masks = attention_masks(trees, config, torch.float32)
    marks = {kind: mask.byte() for kind, mask in masks.items()} if isinstance(masks, dict) else masks.byte()
    given = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": marks}
    return given, torch.searchsorted(places, packed.last)


def sharing_obstacle(decoder: PreTrainedModel) -> str | None:
    """Reason why a decoder's tokens cannot be computed once for several sequences, in words; None if they can.

    A token's state must depend on the tokens it attends to and on their position ids alone.
    """
    config = decoder.config.get_text_config()
    backbone = decoder.base_model
    kinds = set(getattr(config, "layer_types", None) or LAYER_KINDS)
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "its attention looks both ways"
    if "position_ids" not in inspect.signature(backbone.forward).parameters or getattr(config, "alibi", False):
        return "it takes positions from the order of the tokens (ALiBi or the like), not from position ids"
    if not hasattr(inspect.getmodule(type(backbone)), "create_causal_mask"):
        return "it makes its own attention masks"  # transformers' masking_utils alone let a finished mask through
    if unknown := sorted(kinds.difference(LAYER_KINDS)):
        return f"its {', '.join(unknown)} layers take no mask"
    if decoder._is_stateful or any(isinstance(module, torch.nn.Conv1d) for module in backbone.modules()):
        return "its recurrent or convolutional layers carry state from each token to the next"
    if "local" in getattr(config, "attention_layers", ()):
        return "its local attention counts columns, not positions"
    if config._attn_implementation not in KERNELS:
        return f"{config._attn_implementation} takes no mask; set model.attn_implementation to sdpa"
    return None
