"""Rewards from hidden states: the pooled vector of each sequence, and the layer that reads it.

A decoder pools at the last attended token, or as a plug-in does, independent of the pad id and its side.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import HALF, UNPADDED, can_drop_padding, drops_padding, say_once
from rm_optimizer.core.classifier.heads import GatedHead, marker_index
from rm_optimizer.core.classifier.tree_masks import attention_masks, one_row
from rm_optimizer.core.tokens.padding import PackedTrees, num_embeddings, pack_trees
from rm_optimizer.core.tokens.prefix_trees import prefix_tree
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.registry import Registry

PoolingHead = Callable[[Tensor, Tensor], Tensor]
"""Vectors that `score` reads, of shape (sequences, hidden), from hidden states and the attention mask."""
POOLING_HEADS: Registry[PoolingHead] = Registry("pooling head")
"""Pooling heads that users have registered."""


class RewardHead(nn.Linear):
    """A linear layer with one output that computes in float32 or better, outside autocast.

    In bfloat16 a reward near 16 is rounded to multiples of 1/16, so that different responses tie. The layer keeps its
    weights in float32 when the model is cast to a half type, and casts its input to float32. Its state has the names of
    `nn.Linear`.
    """

    def forward(self, input: Float[Tensor, "... hidden"]) -> Float[Tensor, "... 1"]:
        """`input @ weight.T + bias`, in the weight's type."""
        with torch.autocast(device_type=input.device.type, enabled=False):
            return nn.functional.linear(input.to(self.weight.dtype), self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RewardHead:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device, torch.float32) if moved.dtype in HALF else moved

        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        return self


def register_pooling_head(name: str) -> Callable[[PoolingHead], PoolingHead]:
    """Decorator that makes a function the pooling of decoders: `model.pooling_head=NAME`.

    The function gives one vector a sequence from hidden states of shape (sequences, tokens, hidden) and the attention
    mask. The linear layer of the reward reads this vector, in place of the state at the last attended token.

    Args:
        name: name of the pooling head, as the user types it; models that are saved with it record the name.

    Raises:
        ConfigError: if the name is taken, or the function does not return one vector a sequence that is differentiable
            and depends neither on padding, on either side, nor on the other sequences.

    Example:
        >>> @register_pooling_head("mean_of_tokens")
        ... def mean_of_tokens(hidden, attention_mask):
        ...     weights = attention_mask / attention_mask.sum(dim=1, keepdim=True)
        ...     return (hidden * weights[..., None].to(hidden.dtype)).sum(dim=1)
    """

    def add(head: PoolingHead) -> PoolingHead:
        require_pooling(name, head)
        POOLING_HEADS.add(name, head, made_by=head)
        return head

    return add


def require_pooling(name: str, head: PoolingHead) -> None:
    """Refuse a pooling head whose vectors depend on padding or on the batch, or have no gradient.

    Raises:
        ConfigError: if it is refused.
    """
    draws, lengths = torch.Generator().manual_seed(0), torch.tensor([6, 1, 3])
    hidden = torch.randn(3, 6, 4, dtype=torch.float64, generator=draws)
    mask = (torch.arange(6) < lengths[:, None]).long()
    right = head(hidden, mask)
    if not isinstance(right, Tensor) or right.shape != (3, 4):
        got = tuple(right.shape) if isinstance(right, Tensor) else type(right).__name__
        raise ConfigError(
            f"the pooling head '{name}' must return one vector a sequence, of shape (3, 4) for 3 sequences of "
            f"4 channels, got {got}"
        )
    alone = torch.cat([head(hidden[[i], :n], mask[[i], :n]) for i, n in enumerate(lengths)])
    left = head(torch.stack([row.roll(6 - int(n), 0) for row, n in zip(hidden, lengths, strict=True)]), mask.flip(1))
    if not (torch.allclose(alone, right) and torch.allclose(alone, left)):
        raise ConfigError(
            f"the pooling head '{name}' must give a sequence the same vector alone, in a batch and padded on either "
            "side; read no token whose attention_mask is 0"
        )
    if not torch.autograd.gradcheck(lambda states: head(states, mask), hidden.requires_grad_(), raise_exception=False):
        raise ConfigError(f"the pooling head '{name}' must be differentiable in the hidden states; leave out detach")


def pooling_head_of(model: PreTrainedModel) -> str | None:
    """Name of the registered pooling head that a model was given; None for its architecture's own."""
    name: str | None = getattr(model.config, "pooling_head", None)
    return name


def set_pooling_head(model: PreTrainedModel, name: str) -> None:
    """Give a decoder a registered pooling head, whose name its configuration keeps.

    Raises:
        ConfigError: if the name is unknown, or the model is no decoder.
    """
    if not pools_last_token(model):
        raise ConfigError(f"a pooling head is for decoders with a linear score, and {type(model).__name__} is none")
    POOLING_HEADS[name]  # an unknown name is refused before anything is computed
    model.config.pooling_head = name


def pools_last_token(model: PreTrainedModel) -> bool:
    """True if the classifier is a decoder: `score` is applied to each token's hidden state."""
    return isinstance(getattr(model, "score", None), nn.Linear | nn.Sequential | GatedHead)


def last_attended(attention_mask: Int[Tensor, "sequences tokens"]) -> Int[Tensor, " sequences"]:
    """Index of each sequence's last token whose mask is not zero, for padding on either side.

    It is -1 for a sequence that attends to nothing, on an accelerator: a check would wait for the whole pass.

    Raises:
        ValueError: if a sequence attends to nothing, on the CPU.

    Example:
        >>> last_attended(torch.tensor([[1, 1, 0], [0, 1, 1]]))
        tensor([1, 2])
    """
    counted = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device) * (attention_mask != 0)
    last = counted.amax(dim=1) - 1
    if last.device.type == "cpu" and bool((last < 0).any()):
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


def last_token(
    hidden: Float[Tensor, "sequences tokens hidden"], attention_mask: Int[Tensor, "sequences tokens"]
) -> Float[Tensor, "sequences hidden"]:
    """Hidden state of each sequence's last attended token, the built-in pooling.

    Raises:
        ValueError: if a sequence attends to nothing, on the CPU; an accelerator gives NaN.
    """
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    last = last_attended(attention_mask).to(hidden.device)
    states = hidden[rows, last]
    return states if last.device.type == "cpu" else states.masked_fill((last < 0)[:, None], torch.nan)


def decoder_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
) -> Float[Tensor, "sequences 1"]:
    """A decoder's `score` at each sequence's last attended token, or of the vector of its registered pooling head.

    The backbone runs without cache or language-model head, and the head sees one vector of each sequence. Position ids
    follow the mask where the backbone takes them, which makes left padding exact for absolute positions too.
    `transformers` itself pools the rightmost token that is not the pad id, which is wrong where pad and EOS coincide.

    Raises:
        ValueError: if a sequence attends to nothing.
    """
    name = pooling_head_of(model)
    pool = last_token if name is None else POOLING_HEADS[name]
    backbone = model.base_model
    accepted = inspect.signature(backbone.forward).parameters
    given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if "position_ids" in accepted:
        given["position_ids"] = mask_position_ids(attention_mask)
    if name is None and isinstance(model.score, nn.Linear) and computes_columns_alone(model):
        pooled: Tensor = model.score(_states_alone(model, last_attended(attention_mask)[:, None], given)[0][:, 0])
        return pooled
    hidden = backbone(**given).last_hidden_state
    states = pool(hidden, attention_mask)
    if isinstance(model.score, GatedHead):
        index = marker_index(input_ids, model.config.reward_head["marker"])
        if bool((index < 0).any()):
            say_once(
                logging.WARNING,
                "a sequence lacks the marker at which the head reads the prompt; its first token is read instead",
            )
        rows = torch.arange(len(input_ids), device=hidden.device)
        states = torch.cat([states, hidden[rows, index.clamp(min=0)]], dim=-1)
    logits: Tensor = model.score(states)
    return logits


def packed_logits(model: PreTrainedModel, packed: PackedTrees) -> Float[Tensor, "sequences 1"]:
    """A decoder's `score` at the last token of each sequence of the trees, whose shared tokens are computed once."""
    config = model.config.get_text_config()
    if drops_padding(model) and torch.is_grad_enabled():
        given, last = one_row(packed, config)
        scores: Tensor = model.score(model.base_model(use_cache=False, **given).last_hidden_state[0, last])
        return scores
    masks = attention_masks(packed, config, model.dtype)
    given = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "attention_mask": masks}
    if computes_columns_alone(model):
        rows = torch.arange(len(packed.input_ids))
        row, column = packed.last // packed.input_ids.shape[1], packed.last % packed.input_ids.shape[1]
        place = (row[:, None] == rows).cumsum(0).gather(1, row[:, None]).squeeze(1) - 1  # among the row's sequences
        columns = torch.zeros(len(rows), int(place.max()) + 1, dtype=torch.long)
        columns[row, place] = column
        states = _states_alone(model, columns, given | {"use_cache": False})[0][row, place]
    else:
        states = model.base_model(use_cache=False, **given).last_hidden_state.flatten(0, 1)[packed.last]
    logits: Tensor = model.score(states)
    return logits


def drop_tree_padding(decoder: PreTrainedModel) -> None:
    """Let training on a CPU compute trees in one row without padding, if the rewards of two trees are then the same."""
    if not can_drop_padding(decoder) or decoder.device.type != "cpu":
        return
    ids = (torch.arange(1, 9) % num_embeddings(decoder)).numpy()
    trees = [prefix_tree([ids[:3], ids[:6], ids[[0, 4]]]), prefix_tree([ids[2:], ids[[2, 5]]])]
    packed = pack_trees(trees, pad_token_id=0)
    decoder.set_attn_implementation(UNPADDED)
    with torch.no_grad():
        expected = packed_logits(decoder, packed)
        try:
            with torch.enable_grad():
                found = packed_logits(decoder, packed).detach()
        except (IndexError, RuntimeError, TypeError, ValueError):  # its attention reads the mask otherwise
            found = expected + torch.inf
    if not float((found - expected).norm()) <= _tolerance(decoder.dtype) * float(expected.norm()):
        decoder.set_attn_implementation("sdpa")


class _KeysFound(Exception):
    """A layer has computed its keys and values."""


class _Keys:
    """Cache of a layer that stops its first pass at the keys and values, which its second pass gets."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.found: Any = None

    def update(self, *given: Any, **options: Any) -> Any:
        """Keys and values of all tokens."""
        if self.found is not None:
            return self.found
        self.found = given[:2] if self.cache is None else self.cache.update(*given, **options)
        raise _KeysFound


def states_at(
    model: PreTrainedModel, columns: Int[Tensor, "rows columns"], **given: Any
) -> Float[Tensor, "rows columns hidden"]:
    """A decoder's final states at some columns of each row.

    In inference on a CPU the last layer computes only keys and values of the other tokens, whose attention output and
    MLP nothing reads, if the model `computes_columns_alone`.

    Args:
        model: the decoder.
        columns: columns of the states.
        given: arguments of the backbone.
    """
    if computes_columns_alone(model):
        return _states_alone(model, columns, given)[0]
    return _at_columns(model.base_model(**given).last_hidden_state, columns)


def _at_columns(states: Tensor, columns: Tensor) -> Tensor:
    return states[torch.arange(len(columns), device=columns.device)[:, None], columns]


class _Selection:
    """Hook that calls the last layer for the keys and values, then lets it go on with the columns."""

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.thread = threading.get_ident()
        self.is_made = False

    def taken(self, values: Tensor) -> Tensor:
        """Values at the columns of each row."""
        return _at_columns(values.expand(len(self.columns), *values.shape[1:]), self.columns)

    def __call__(self, layer: nn.Module, args: Any, options: dict[str, Any] | None = None) -> Any:
        # torch gives no options to a hook that another thread removes meanwhile; ids of hooks of two threads may be one
        if options is None or threading.get_ident() != self.thread:
            return None
        keys, mask = _Keys(options["past_key_values"]), options["attention_mask"]
        with suppress(_KeysFound):
            layer.forward(*args, **options | {"past_key_values": keys})
        changed = {"past_key_values": keys, "position_ids": self.taken(options["position_ids"])}
        changed["position_embeddings"] = tuple(map(self.taken, options["position_embeddings"]))
        changed["attention_mask"] = None if mask is None else self.taken(mask.transpose(1, 2)).transpose(1, 2)
        self.is_made = True
        return tuple(map(self.taken, args)), options | changed


def _states_alone(model: PreTrainedModel, columns: Tensor, given: dict[str, Any]) -> tuple[Tensor, bool]:
    """Final states at the columns, and True if the last layer computed no others.

    It computes all if another thread removes the hook meanwhile.
    """
    select = _Selection(columns)
    hook = model.base_model.layers[-1].register_forward_pre_hook(select, with_kwargs=True)
    try:
        states: Tensor = model.base_model(**given).last_hidden_state
    finally:
        hook.remove()
    return (states, True) if select.is_made else (_at_columns(states, columns), False)


_COMPUTES_COLUMNS_ALONE: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def computes_columns_alone(model: PreTrainedModel) -> bool:
    """True in inference on a CPU if `states_at` gives a decoder's own states, which is tried once."""
    if not torch.is_inference_mode_enabled() or model.device.type != "cpu":
        return False
    tried, backbone = _COMPUTES_COLUMNS_ALONE.get(model), model.base_model
    if tried is False or backbone._compiled_call_impl is not None or _hooks_read_tokens(backbone):
        return False
    if tried is None:
        _COMPUTES_COLUMNS_ALONE[model] = _gives_own_states(model)
        if not _COMPUTES_COLUMNS_ALONE[model]:
            say_once(
                logging.INFO, f"the last layer of {type(model).__name__} computes every token, not the pooled ones"
            )
    return _COMPUTES_COLUMNS_ALONE[model]


def _hooks_read_tokens(backbone: nn.Module) -> bool:
    """True if a hook may read every token: one after the backbone, or on a module from its last layer on."""
    layers = getattr(backbone, "layers", None)
    parts = [each for each in backbone.children() if each is not layers and not isinstance(each, nn.Embedding)]
    read = [each for part in (*parts, *([layers[-1]] if layers else ())) for each in part.modules()]
    hooks = [*backbone._forward_hooks.values()]
    for each in read:
        hooks += (*each._forward_hooks.values(), *each._forward_pre_hooks.values())
    return any(not isinstance(hook, _Selection) for hook in hooks)


def _gives_own_states(model: PreTrainedModel) -> bool:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    ids, columns = torch.arange(6).expand(2, 6), torch.tensor([[2, 5], [1, 3]])
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": mask_position_ids(mask), "use_cache": False}
    try:
        found, is_made = _states_alone(model, columns, given)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):  # its layers have another form
        return False
    own = _at_columns(model.base_model(**given).last_hidden_state, columns)
    is_own = found.shape == own.shape and (found - own).abs().max() <= _tolerance(own.dtype) * own.abs().max()
    return is_made and bool(is_own)


def _tolerance(dtype: torch.dtype) -> float:
    """Relative difference of two ways to compute that counts as rounding."""
    return 2**-5 if dtype in HALF else 1e-4


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
    return plain_logits(model, input_ids, attention_mask)


def plain_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "sequences tokens"], attention_mask: Int[Tensor, "sequences tokens"]
) -> Float[Tensor, "sequences labels"]:
    """Logits of the model's forward pass in `transformers`, or of its registered pooling head."""
    if pooling_head_of(model) is not None:
        return decoder_logits(model, input_ids, attention_mask)
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask).logits
    return logits
