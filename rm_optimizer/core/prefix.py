"""Shared-prompt packing: the prompt once, every response after it, several prompts in a row.

A causal model gives a token the same hidden state whatever follows it, so the tokens that two sequences have in common
at their start need computing once. A row then holds trees: a prefix and the branches that continue it, each branch
attending to the prefix and to itself, with positions that restart where the prefix ends. Rewards and gradients equal
those of the sequences apart (as in flash-preference, li-plus, 2025; here with any attention that takes a mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.errors import ConfigError

PADDING = -1
"""Group of a padded position."""


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
        return len(self.prefix) + sum(len(branch) for branch in self.branches)


def prefix_tree(sequences: Sequence[NDArray[np.int32]]) -> PrefixTree:
    """The sequences as one tree: the longest common prefix that leaves each of them at least its last token.

    Example:
        >>> tree = prefix_tree([np.array([1, 2, 3]), np.array([1, 2, 4, 5])])
        >>> tree.prefix.tolist(), [branch.tolist() for branch in tree.branches]
        ([1, 2], [[3], [4, 5]])
    """
    shared = min(len(sequence) for sequence in sequences) - 1
    head = sequences[0][:shared]
    for sequence in sequences[1:]:
        differ = np.flatnonzero(head != sequence[: len(head)])
        head = head[: differ[0]] if len(differ) else head
    return PrefixTree(head, tuple(sequence[len(head) :] for sequence in sequences))


@dataclass(frozen=True)
class PackedTrees:
    """Trees in rows.

    Args:
        input_ids: token ids, `(rows, tokens)`.
        position_ids: positions, restarting in each tree and continuing the prefix in each branch.
        group: number of the tree in its row, `PADDING` where there is none.
        branch: 0 in a prefix, 1, 2, … in the branches.
        last: flat index `row * tokens + column` of the last token of each sequence, tree by tree.
    """

    input_ids: Int[Tensor, "rows tokens"]
    position_ids: Int[Tensor, "rows tokens"]
    group: Int[Tensor, "rows tokens"]
    branch: Int[Tensor, "rows tokens"]
    last: Int[Tensor, " sequences"]

    @property
    def num_tokens(self) -> int:
        """Tokens, padding left out."""
        return int((self.group != PADDING).sum())

    @property
    def num_padded_tokens(self) -> int:
        """Tokens moved, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> PackedTrees:
        """The same on another device."""
        names = ("input_ids", "position_ids", "group", "branch", "last")
        return PackedTrees(**{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def assign_rows(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Trees to rows of at most `capacity` tokens, first fit by decreasing size; a larger tree has a row of its own.

    Example:
        >>> assign_rows([5, 9, 4, 3], capacity=9)
        [[1], [0, 2], [3]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((r for r, left in enumerate(room) if left >= sizes[index]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= sizes[index]
    return rows


def pack_trees(trees: Sequence[PrefixTree], *, pad_token_id: int) -> PackedTrees:
    """Rows as long as the largest tree, filled with the others; `last` keeps the order of the trees."""
    sizes = [tree.num_tokens for tree in trees]
    width = max(sizes)
    rows = assign_rows(sizes, width)
    table = np.zeros((4, len(rows), width), dtype=np.int64)
    ids, position, group, branch = table
    ids.fill(pad_token_id)
    group.fill(PADDING)
    last: list[list[int]] = [[] for _ in trees]
    for r, members in enumerate(rows):
        start = 0
        for number, index in enumerate(members):
            tree = trees[index]
            depth = len(tree.prefix)
            for b, part in enumerate((tree.prefix, *tree.branches)):
                stop = start + len(part)
                first = depth if b else 0
                ids[r, start:stop] = part
                position[r, start:stop] = np.arange(first, first + len(part))
                group[r, start:stop] = number
                branch[r, start:stop] = b
                start = stop
                if b:
                    last[index].append(r * width + stop - 1)
    flat = torch.tensor([place for places in last for place in places], dtype=torch.int64)
    input_ids, position_ids, groups, branches = (torch.from_numpy(part.copy()) for part in table)
    return PackedTrees(input_ids, position_ids, groups, branches, flat)


def tree_mask(packed: PackedTrees, window: int | None = None) -> Bool[Tensor, "rows 1 tokens tokens"]:
    """Which keys (last axis) each query attends to: its own prefix and branch, backwards, within the window.

    Padding attends to padding, so that no row of the softmax is empty.

    Args:
        packed: the rows.
        window: sliding-window width in positions, or None.
    """
    group, branch, position = packed.group, packed.branch, packed.position_ids
    tokens = group.shape[1]
    same_tree = group[:, :, None] == group[:, None, :]
    same_path = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    order = torch.arange(tokens, device=group.device)
    allowed = same_tree & same_path & (order[None, :, None] >= order[None, None, :])
    if window is not None:
        near = position[:, :, None] - position[:, None, :] < window
        allowed &= near | (group[:, :, None] == PADDING)
    return allowed[:, None]


def attention_masks(packed: PackedTrees, config: Any, dtype: torch.dtype) -> Any:
    """The mask in the form the model's layers take: a tensor, or one a layer kind.

    Args:
        packed: the rows.
        config: the text model's configuration.
        dtype: of the additive mask that eager attention wants.

    Raises:
        ConfigError: if the attention kernel takes no mask.
    """
    kernel = config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise ConfigError(
            f"batching.prefix_sharing needs an attention that takes a mask (sdpa or eager), got {kernel}; "
            "set model.attn_implementation=sdpa or batching.prefix_sharing=off"
        )

    def ready(window: int | None) -> Tensor:
        mask = tree_mask(packed, window)
        if kernel == "sdpa":
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return ready(window)
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"batching.prefix_sharing knows no {', '.join(sorted(unknown))} layers; set it to off")
    return {kind: ready(window if kind == "sliding_attention" else None) for kind in kinds}


def last_hidden(hidden: Float[Tensor, "rows tokens hidden"], packed: PackedTrees) -> Float[Tensor, "sequences hidden"]:
    """Hidden state of each sequence's last token."""
    return hidden.flatten(0, 1)[packed.last]
