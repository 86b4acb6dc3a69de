"""Shared-prompt packing: the prompt once, every response after it, several prompts in a row.

A causal model gives a token the same hidden state whatever follows it, so the tokens that two sequences have in common
at their start need computing once. A row then holds trees: a prefix and the branches that continue it, each branch
attending to the prefix and to itself, with positions that restart where the prefix ends. Rewards and gradients equal
those of the sequences apart (as in flash-preference, li-plus, 2025; here with any attention that takes a mask).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from rm_optimizer.core.attention_switch import SWITCHES
from rm_optimizer.core.packing import assign_rows

KERNELS = ("sdpa", "eager", "flex_attention", *SWITCHES)
"""Attention kernels that take a mask of any form."""
TREE_TOKENS = 1024
"""Most tokens of a tree of many branches; on a CPU and with 12M parameters, 1024 cost 1.3 times what 128 do a token."""
LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers, as configurations list them, whose masks are known."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Token sequences cut where they part.

    Args:
        prefix: the tokens all of them start with; may be empty.
        branches: what follows in each, never empty.
    """

    prefix: NDArray[np.int32]
    branches: tuple[NDArray[np.int32], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the tree."""
        return len(self.prefix) + sum(map(len, self.branches))

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of the sequences apart."""
        return self.num_tokens + (len(self.branches) - 1) * len(self.prefix)


def shared_length(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Tokens that two sequences have in common at their start, short of the last token of either.

    Example:
        >>> shared_length(np.array([1, 2, 3], np.int32), np.array([1, 2, 3, 4], np.int32))
        2
    """
    shortest = min(len(first), len(second)) - 1
    differ = first[:shortest] != second[:shortest]
    place = int(differ.argmax()) if shortest else 0
    return place if shortest and differ[place] else shortest


def prefix_tree(sequences: Sequence[NDArray[np.int32]]) -> PrefixTree:
    """The sequences as one tree: the longest common prefix that leaves each of them at least its last token.

    Example:
        >>> tree = prefix_tree([np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)])
        >>> tree.prefix.tolist(), [branch.tolist() for branch in tree.branches]
        ([1, 2], [[3], [4, 5]])
    """
    first = sequences[0]
    depth = min((shared_length(first, other) for other in sequences[1:]), default=len(first) - 1)
    return PrefixTree(first[:depth], tuple(sequence[depth:] for sequence in sequences))


def tree_groups(
    sequences: Sequence[NDArray[np.int32]], groups: Sequence[Sequence[int]], most_tokens: int
) -> list[list[int]]:
    """Groups of sequences that start alike, cut into runs of which each makes a tree of at most `most_tokens` tokens.

    A sequence that is longer stands alone. The limit pays, since a row's attention costs the square of its width.
    """
    runs: list[list[int]] = []
    for group in groups:
        run: list[int] = []
        for index in group:
            if run and prefix_tree([sequences[i] for i in (*run, index)]).num_tokens > most_tokens:
                runs.append(run)
                run = []
            run.append(index)
        runs.append(run)
    return runs


@dataclass(frozen=True)
class PackedTrees:
    """Trees in rows.

    Args:
        input_ids: token ids, `(rows, tokens)`.
        position_ids: positions, restarting in each tree and continuing the prefix in each branch.
        end: first column that no longer sees the token: the end of its tree for a prefix's, of its branch for a
            branch's, of the row for padding.
        last: flat index `row * tokens + column` of the last token of each sequence, tree by tree.
        num_tokens: tokens in the rows, padding left out.
        num_sequence_tokens: tokens of the sequences apart.
    """

    input_ids: Int[Tensor, "rows tokens"]
    position_ids: Int[Tensor, "rows tokens"]
    end: Int[Tensor, "rows tokens"]
    last: Int[Tensor, " sequences"]
    num_tokens: int
    num_sequence_tokens: int

    @property
    def num_padded_tokens(self) -> int:
        """Tokens moved, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedTrees:
        """The same on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedTrees:
        """The same in page-locked memory."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> PackedTrees:
        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            end=move(self.end),
            last=move(self.last),
        )


def pack_trees(trees: Sequence[PrefixTree], *, pad_token_id: int) -> PackedTrees:
    """Rows as wide as the largest tree, filled with the others; `last` keeps the order of the trees."""
    sizes = [tree.num_tokens for tree in trees]
    rows, width = assign_rows(sizes), max(sizes)
    ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    position = np.zeros_like(ids)
    end = np.full(ids.shape, width, dtype=np.int32)
    last: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(trees)
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            ends = _write(trees[index], start, ids[row], position[row], end[row])
            last[index] = row * width + ends - 1
            start += sizes[index]
    return PackedTrees(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position),
        end=torch.from_numpy(end),
        last=torch.from_numpy(np.concatenate(last)),
        num_tokens=sum(sizes),
        num_sequence_tokens=sum(tree.num_sequence_tokens for tree in trees),
    )


def _write(
    tree: PrefixTree, start: int, ids: NDArray[np.int64], position: NDArray[np.int64], end: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Write a tree into a row from column `start` on, and return the column after each branch."""
    depth = len(tree.prefix)
    ids[start : start + depth] = tree.prefix
    position[start : start + depth] = np.arange(depth)
    end[start : start + depth] = start + tree.num_tokens
    stops = start + depth + np.cumsum([len(branch) for branch in tree.branches])
    for branch, stop in zip(tree.branches, stops.tolist(), strict=True):
        inside = slice(stop - len(branch), stop)
        ids[inside] = branch
        position[inside] = np.arange(depth, depth + len(branch))
        end[inside] = stop
    return stops


def tree_mask(packed: PackedTrees, window: int | None = None) -> Bool[Tensor, "rows 1 tokens tokens"]:
    """Which keys (last axis) each query attends to: its own prefix and branch, backwards, within the window.

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
        dtype: of the additive mask that eager attention wants.
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
    """Whether shared prompts get a block mask: FlexAttention by name, or a switch that has it, on CUDA."""
    assert kernel in KERNELS, f"sharing_obstacle lets no {kernel} pass"
    return kernel == "flex_attention" or (kernel in SWITCHES and SWITCHES[kernel].has_blocks and device.type == "cuda")


def last_hidden(hidden: Float[Tensor, "rows tokens hidden"], packed: PackedTrees) -> Float[Tensor, "sequences hidden"]:
    """Hidden state of each sequence's last token."""
    return hidden.flatten(0, 1)[packed.last]


def sharing_obstacle(decoder: PreTrainedModel) -> str | None:
    """Why a decoder's tokens cannot be computed once for several sequences, in words, or None where they can.

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
