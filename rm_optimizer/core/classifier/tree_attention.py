"""Attention over packed prefix trees: masks for every kernel, and the decoders that can be given them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention_switch import SWITCHES
from rm_optimizer.core.tokens.packed_trees import PackedTrees

KERNELS = ("sdpa", "eager", "flex_attention", *SWITCHES)
"""Attention kernels that take a mask of any form."""
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
    masks = {kind: _kernel_mask(packed, config._attn_implementation, width, dtype) for kind, width in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _kernel_mask(packed: PackedTrees, kernel: str, window: int | None, dtype: torch.dtype) -> Tensor | BlockMask:
    if takes_blocks(kernel, packed.end.device):
        return tree_block_mask(packed, window)
    mask = tree_mask(packed, window)
    if kernel != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def takes_blocks(kernel: str, device: torch.device) -> bool:
    """True if shared prompts get a block mask: FlexAttention by name, or a switch that has it, on CUDA."""
    assert kernel in KERNELS, f"sharing_obstacle lets no {kernel} pass"
    return kernel == "flex_attention" or (kernel in SWITCHES and SWITCHES[kernel].has_blocks and device.type == "cuda")


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
    if not hasattr(sys.modules[type(backbone).__module__], "create_causal_mask"):
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
