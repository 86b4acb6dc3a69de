"""Choice of the pad token: an id that never ends a sequence and needs no larger embedding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
