"""Padding: an id that never ends a sequence and needs no larger embedding, and token ids in padded or packed rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rm_optimizer.core.tokens.plan import assign_rows
from rm_optimizer.core.tokens.prefix_trees import PrefixTree
from rm_optimizer.errors import CheckpointError

RESERVED = (
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_0|>",
    "<|fim_pad|>",
    "<|endoftext|>",
    "<pad>",
    "<|pad|>",
    "[PAD]",
)
"""Tokens that vocabularies reserve for such a purpose, most specific first."""
_SPACED = ("Ġ", "▁", "##")


@dataclass(frozen=True)
class PadChoice:
    """The pad token in use and why.

    Args:
        token: its text in the vocabulary.
        token_id: its id.
        reason: origin of the choice, in words.
    """

    token: str
    token_id: int
    reason: str


def choose_pad_token(
    tokenizer: PreTrainedTokenizerBase,
    num_embeddings: int,
    last_ids: Collection[int] = (),
    *,
    ends_freely: bool = False,
) -> PadChoice:
    """Give the tokenizer a pad token that is never a sequence's last token, and return it with the reason.

    `transformers` reads a decoder's reward at the rightmost token that is not the pad id. With pad == EOS it reads one
    token too early, but any id that never ends a sequence is correct. The first possible one of these is chosen: the
    tokenizer's own pad token, a token that its vocabulary reserves, its unknown token, a new token in an unused row of
    the embedding, the ordinary token with the highest id.

    Args:
        tokenizer: the tokenizer, which is changed and then pads on the right.
        num_embeddings: number of rows of the model's embedding, which is never resized.
        last_ids: ids that end rendered sequences, in addition to EOS and SEP.
        ends_freely: True if, without EOS, a sequence ends with its response's own last token, so that no token of
            ordinary text may be the pad token.

    Raises:
        CheckpointError: if the tokenizer has more tokens than the embedding has rows, or no id is possible.
    """
    if tokenizer.vocab_size > num_embeddings:
        raise CheckpointError(
            f"expected at most as many tokens as the embedding's {num_embeddings} rows, got a tokenizer with "
            f"{tokenizer.vocab_size}; use the tokenizer that belongs to the model"
        )
    tokenizer.padding_side = "right"
    endings = {tokenizer.eos_token_id, tokenizer.sep_token_id, *last_ids} - {None}
    current = tokenizer.pad_token_id
    if current is not None and current not in endings and current < num_embeddings:
        return PadChoice(str(tokenizer.pad_token), int(current), "the tokenizer's own pad token")
    why = (
        "the tokenizer has no pad token" if current is None else f"its pad token {tokenizer.pad_token!r} ends sequences"
    )
    token, origin = _free_token(tokenizer, num_embeddings, endings, ends_freely)
    tokenizer.add_special_tokens({"pad_token": token})
    return PadChoice(token, int(tokenizer.convert_tokens_to_ids(token)), f"{why}; took {origin}")


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of token ids for which the model has an embedding.

    Raises:
        CheckpointError: if it embeds no token ids.
    """
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError) as error:
        raise CheckpointError(f"{type(model).__name__} has no embedding of token ids; use another model") from error


def set_pad_token_id(model: PreTrainedModel, pad_token_id: int) -> None:
    """Write the pad id into the model's configuration and its nested configurations.

    The embedding's `padding_idx` is removed, since it stops the gradient of its row. That row is EOS's own if the model
    was built with pad == EOS. Masked positions have no gradient in any case.
    """
    for config in _configs(model.config):
        config.pad_token_id = pad_token_id
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _configs(value)


def _free_token(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, endings: set[int], ends_freely: bool
) -> tuple[str, str]:
    vocabulary = tokenizer.get_vocab()
    usable = {token: index for token, index in vocabulary.items() if index < num_embeddings and index not in endings}
    for token in RESERVED:
        if token in usable:
            return token, "a token the vocabulary reserves"
    unknown = tokenizer.unk_token
    if unknown in usable and unknown != tokenizer.bos_token and not ends_freely:
        return unknown, "the unknown token"
    if max(vocabulary.values()) + 1 < num_embeddings and "<|pad|>" not in vocabulary:
        return "<|pad|>", "a new token in an unused row of the embedding"
    if ends_freely:
        raise CheckpointError(
            "the tokenizer has neither EOS nor a pad token, so any token may end a sequence and none is free for "
            "padding; set the tokenizer's eos_token or pad_token and save it with the model"
        )
    ordinary = usable.keys() - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab())
    if not ordinary:
        raise CheckpointError("expected a token that can serve as padding, but the tokenizer's vocabulary has none")
    # A pad token is matched in raw text before the vocabulary's own rules. Raw text never has one with a boundary sign.
    best = max(ordinary, key=lambda token: (token.startswith(_SPACED) and len(token) > 2, usable[token]))
    return best, "the highest ordinary token"


def pad_sequences(
    ids: Sequence[Sequence[int] | NDArray[np.int32]], pad_token_id: int
) -> tuple[Int[Tensor, "sequences tokens"], Int[Tensor, "sequences tokens"]]:
    """Input ids and attention mask of the sequences, padded on the right to the longest."""
    lengths = np.array([len(sequence) for sequence in ids], dtype=np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    padded = np.full(mask.shape, pad_token_id, dtype=np.int64)
    for row, sequence in zip(padded, ids, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded), torch.from_numpy(mask.astype(np.int64))


@dataclass(frozen=True)
class PackedTrees:
    """Trees in rows.

    Args:
        input_ids: token ids, `(rows, tokens)`.
        position_ids: positions, which start at 0 in each tree and continue the prefix in each branch.
        end: first later column that does not attend to the token. It is the end of the tree for a token of the prefix,
            of the branch for a token of a branch, and of the row for padding.
        last: flat index `row * tokens + column` of the last token of each sequence, tree by tree.
        num_tokens: number of tokens in the rows, without padding.
        num_sequence_tokens: number of tokens of the separate sequences.
    """

    input_ids: Int[Tensor, "rows tokens"]
    position_ids: Int[Tensor, "rows tokens"]
    end: Int[Tensor, "rows tokens"]
    last: Int[Tensor, " sequences"]
    num_tokens: int
    num_sequence_tokens: int

    @property
    def num_padded_tokens(self) -> int:
        """Number of tokens in the rows, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedTrees:
        """The same on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedTrees:
        """The same in page-locked memory."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> PackedTrees:
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def pack_trees(trees: Sequence[PrefixTree], *, pad_token_id: int) -> PackedTrees:
    """Pack trees into rows as wide as the largest one; `last` has the order of the given trees."""
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
