"""Attention kernels: the switch between them by pass, and the choice for a model.

`transformers` reads one kernel from the configuration for every pass. A reward model has passes of several kinds. Trees
of shared prompts need block masks, which only FlexAttention has. Padded pairs under autocast are fastest with
FlashAttention 2, which removes the padding. Passes in float32 need SDPA. A switch chooses the kernel for each pass by
its tensors alone, so that passes recomputed by gradient checkpointing use the same kernel again.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, flash_attention_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

from rm_optimizer.errors import MissingExtra, require_known

HALF = (torch.float16, torch.bfloat16)
"""Half types: FlashAttention 2 computes in them, and no head does."""


@dataclass(frozen=True)
class AttentionSwitch:
    """PyTorch's scaled dot product, exchanged for a faster kernel where one fits.

    Args:
        has_blocks: True if the model uses FlexAttention with block masks, on CUDA, for shared prompts.
        has_varlen: True if the model uses FlashAttention 2, on CUDA in a half type, for padded sequences.
    """

    has_blocks: bool
    has_varlen: bool

    @property
    def name(self) -> str:
        """Name of this attention in `transformers`, which checks names that contain `sdpa` as it does SDPA."""
        return "sdpa" + "_or_flex" * self.has_blocks + "_or_fa2" * self.has_varlen

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | BlockMask | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the kernel that mask, device and type of the pass determine."""
        dtype = computing_dtype(query.device, value.dtype)
        found: tuple[Tensor, Tensor | None]
        if isinstance(attention_mask, BlockMask):
            found = flex_attention_forward(module, *_cast(dtype, query, key, value), attention_mask, **options)
        elif self.unpads(query.device, dtype) and (attention_mask is None or attention_mask.ndim == 2):
            caller = _FlashCaller(getattr(module, "is_causal", True))
            found = flash_attention_forward(caller, *_cast(dtype, query, key, value), attention_mask, **options)
        else:
            found = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found

    def mask(self, *sizes: Any, device: torch.device, dtype: torch.dtype, **options: Any) -> Tensor | None:
        """The mask of padded sequences, in the form that the kernel of the pass needs."""
        unpads = self.unpads(device, computing_dtype(device, dtype))
        make_mask = flash_attention_mask if unpads else sdpa_mask
        mask: Tensor | None = make_mask(*sizes, device=device, dtype=dtype, **options)
        return mask

    def unpads(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if padded sequences go through FlashAttention 2."""
        return self.has_varlen and torch.device(device).type == "cuda" and dtype in HALF


@dataclass(frozen=True)
class _FlashName:
    _attn_implementation: str = "flash_attention_2"


@dataclass(frozen=True)
class _FlashCaller:
    """Attributes of a layer that `flash_attention_forward` reads, since its own configuration names this switch."""

    is_causal: bool
    config: _FlashName = _FlashName()


def computing_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Type that attention computes in: autocast's if it is on, else the tensors' own."""
    kind = torch.device(device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert the tensors to one type, since norms of queries and keys do not keep autocast's."""
    return tuple(tensor.to(dtype) for tensor in tensors)


SWITCHES = {
    switch.name: switch
    for switch in (AttentionSwitch(True, True), AttentionSwitch(True, False), AttentionSwitch(False, True))
}
"""The switches by name, registered with `transformers`."""

for switch in SWITCHES.values():
    AttentionInterface.register(switch.name, switch)
    AttentionMaskInterface.register(switch.name, switch.mask)

UNPADDED = "sdpa_unpadded"
"""Name of SDPA on a CPU whose padded sequences pass an encoder's layers as one row of tokens, without padding."""


def unpadded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention within each sequence of a row, by a mask of `unpadded_mask`; SDPA for other masks and padded states."""
    if _marks_tokens(attention_mask) and query.shape[0] * query.shape[2] != int(_tokens(attention_mask).sum()):
        attention_mask = attention_mask.bool()  # padded states, of a copy of the model without its hooks
    if not _marks_tokens(attention_mask):
        found: tuple[Tensor, Tensor | None]
        found = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    lengths, options["is_causal"] = _tokens(attention_mask).sum(dim=1).tolist(), False
    masks: list[Tensor | None] = [None] * len(lengths)
    if attention_mask.shape[2] > 1:
        masks = [mask[:n, :n] for mask, n in zip(attention_mask[:, 0].view(torch.bool), lengths, strict=True)]
    sequences = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), masks, strict=True)
    return torch.cat([sdpa_attention_forward(module, *each, **options)[0] for each in sequences], dim=1), None


def unpadded_mask(*, attention_mask: Tensor | None, device: torch.device, **options: Any) -> Tensor | None:
    """SDPA's mask, in uint8 for an encoder's sequences that are padded on the right, on a CPU.

    It has shape (sequences, 1, 1, tokens) where all tokens of a sequence attend to each other.
    """
    is_encoder = not options.get("allow_is_causal_skip", True) and options["q_length"] == options["kv_length"]
    drops = False
    if is_encoder and attention_mask is not None and torch.device(device).type == "cpu":
        drops = bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()) and not bool(attention_mask.all())
        if drops and options["mask_function"] is bidirectional_mask_function:
            return attention_mask[:, None, None].byte()
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, device=device, **options)
    return mask.byte() if drops and mask is not None else mask


AttentionInterface.register(UNPADDED, unpadded_attention)
AttentionMaskInterface.register(UNPADDED, unpadded_mask)


def _marks_tokens(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 4 and value.dtype == torch.uint8


def _tokens(mask: Tensor) -> Bool[Tensor, "sequences tokens"]:
    """Mask of the tokens, which all attend to themselves."""
    return (mask[:, 0, 0] if mask.shape[2] == 1 else mask[:, 0].diagonal(dim1=1, dim2=2)).bool()


def _row(states: Tensor, tokens: Bool[Tensor, "sequences tokens"]) -> Tensor:
    """Padded states in one row without padding."""
    return states.expand(len(tokens), -1, -1).flatten(0, 1).index_select(0, tokens.flatten().nonzero()[:, 0])[None]


def _padded(row: Tensor, tokens: Bool[Tensor, "sequences tokens"]) -> Tensor:
    """States of a row, padded with zeros."""
    states = row.new_zeros(tokens.numel(), row.shape[-1])
    return states.index_copy(0, tokens.flatten().nonzero()[:, 0], row[0]).view(*tokens.shape, -1)


def _into_row(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a layer: padded states and rotary angles become one row."""
    mask = next(filter(_marks_tokens, (*args, *kwargs.values())), None)
    if mask is None:
        return None
    tokens = _tokens(mask)
    if args[0].shape[:2] == tokens.shape:
        args = (_row(args[0], tokens), *args[1:])
    if (angles := kwargs.get("position_embeddings")) is not None:
        kwargs = kwargs | {"position_embeddings": tuple(_row(each, tokens) for each in angles)}
    return args, kwargs


def _out_of_row(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor) -> Tensor | None:
    """Hook after the last layer: the row becomes padded states again, with zeros for padding."""
    mask = next(filter(_marks_tokens, (*args, *kwargs.values())), None)
    if mask is None:
        return None
    return _padded(states, _tokens(mask))


def _pad_hidden_states(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
    """Hook after the backbone: states of the layers, where the caller asks for them, are padded too."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    found = getattr(outputs, "hidden_states", None)
    if found and mask is not None and mask.ndim == 2:
        tokens = mask.bool()
        row = (1, int(tokens.sum()))
        outputs.hidden_states = tuple(
            each if each is None or each.shape[:2] != row else _padded(each, tokens)  # None for a layer not asked for
            for each in found
        )


def drop_padding(encoder: PreTrainedModel, read: Callable[[], Tensor], tolerance: float) -> bool:
    """Let an encoder's layers compute no padding on a CPU, if its head then reads the same; True if they do.

    Embeddings and head still see padded sequences, so that positions, token types and pooling are the model's own.
    Passes on other devices are padded as before.

    Args:
        encoder: the model; it gets hooks and another attention.
        read: the head's input for padded sequences of unlike lengths, computed by the encoder.
        tolerance: largest relative change of it that counts as rounding.
    """
    backbone = encoder.base_model
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    makes_masks = hasattr(inspect.getmodule(type(backbone)), "create_bidirectional_mask")
    if not (layers and makes_masks and can_drop_padding(encoder)):
        return False
    padded = read()
    hooks = [layer.register_forward_pre_hook(_into_row, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(_out_of_row, with_kwargs=True))
    hooks.append(backbone.register_forward_hook(_pad_hidden_states, with_kwargs=True))
    encoder.set_attn_implementation(UNPADDED)
    try:
        found = read()
        if found.shape == padded.shape and float((found - padded).norm()) <= tolerance * float(padded.norm()):
            return True
    except (RuntimeError, IndexError, TypeError, ValueError):  # layers that take more than states, angles and mask
        pass
    encoder.set_attn_implementation("sdpa")
    for hook in hooks:
        hook.remove()
    return False


def can_drop_padding(model: PreTrainedModel) -> bool:
    """True if the model's attention is SDPA and can be switched to `UNPADDED`."""
    return str(model.config._attn_implementation) == "sdpa" and model._can_set_attn_implementation()


def drops_padding(model: PreTrainedModel) -> bool:
    """True if passes of the model, where it is now, compute no padding."""
    return str(model.config._attn_implementation) == UNPADDED and model.device.type == "cpu"


@contextmanager
def keeping_padding(model: PreTrainedModel) -> Iterator[None]:
    """Padded passes inside the block, whose operations depend on shapes alone and not on values of masks."""
    kernel = str(model.config._attn_implementation)
    if kernel == UNPADDED:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(kernel)


CHAIN = ("flash_attention_2", "sdpa", "eager")
"""Kernels from fastest to most general; each falls back to the next."""
LEAST_HEAD_DIM = 16
"""Channels of a head that FlexAttention's CUDA kernel needs."""
_log = logging.getLogger("rm_optimizer")


def choose_attention(
    config: PretrainedConfig, requested: str, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> str:
    """The first kernel of `CHAIN`, from the requested one on, that the model and this machine have.

    On a CUDA machine `auto` is a switch (`AttentionSwitch`) where the model has SDPA: FlexAttention for shared prompts,
    FlashAttention 2 for padded sequences in a half type, SDPA for the rest. For weights in float32, `flash_attention_2`
    is such a switch too, since FlashAttention cannot compute passes outside autocast. Skipped kernels and the reasons
    are logged once, as a warning if the user requested one of them by name.

    Args:
        config: the model's configuration; not changed.
        requested: `auto` or a kernel's name.
        dtype: type of the weights.
        trust_remote_code: run modeling code that the checkpoint brings.

    Raises:
        ConfigError: if the name is unknown.
    """
    require_known("model.attn_implementation", requested, ("auto", *CHAIN))
    named_for_float = requested == "flash_attention_2" and dtype not in HALF
    if torch.cuda.is_available() and (requested == "auto" or named_for_float):
        switch = _switch(config, trust_remote_code, level=logging.WARNING if named_for_float else logging.INFO)
        if switch is not None:
            return switch
    candidates = CHAIN[CHAIN.index(requested) :] if requested in CHAIN else CHAIN
    reasons: list[str] = []
    for kernel in candidates:
        obstacle = _obstacle(config, kernel, dtype, trust_remote_code)
        if obstacle is None:
            if reasons:
                level = logging.INFO if requested == "auto" else logging.WARNING
                say_once(level, f"attention uses {kernel}: {'; '.join(reasons)}")
            return kernel
        reasons.append(f"{kernel}: {obstacle}")
    raise AssertionError("every model has eager attention")


def soft_cap(config: PretrainedConfig) -> float | None:
    """Bound on a model's attention logits (Gemma 2), which PyTorch's scaled dot product ignores; None without one."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return float(cap) if cap else None


def _switch(config: PretrainedConfig, trust_remote_code: bool, *, level: int) -> str | None:
    """Switch between SDPA and the model's other kernels on CUDA; None if it has no SDPA, or SDPA computes otherwise."""
    if _obstacle(config, "sdpa", torch.float32, trust_remote_code):
        return None
    blocks = _obstacle(config, "flex_attention", torch.float32, trust_remote_code)
    varlen = _obstacle(config, "flash_attention_2", torch.bfloat16, trust_remote_code)
    if blocks is not None:
        say_once(logging.INFO, f"shared prompts use sdpa with a dense mask: flex_attention: {blocks}")
    if varlen is not None:
        say_once(level, f"padded sequences use sdpa: flash_attention_2: {varlen}")
    return AttentionSwitch(has_blocks=blocks is None, has_varlen=varlen is None).name


def _obstacle(config: PretrainedConfig, kernel: str, dtype: torch.dtype, trust_remote_code: bool) -> str | None:
    if kernel == "flash_attention_2":
        if not torch.cuda.is_available():
            return "needs a CUDA device"
        if not is_flash_attn_2_available():
            return str(MissingExtra("flash-attn", "flash"))
        if dtype not in HALF:
            return f"needs weights in float16 or bfloat16, these are {str(dtype).removeprefix('torch.')}"
    if kernel == "flex_attention":
        text = config.get_text_config()
        channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if channels < LEAST_HEAD_DIM:
            return f"needs heads of at least {LEAST_HEAD_DIM} channels, these have {channels}"
        if getattr(text, "attention_dropout", 0.0):
            return "has no dropout, set model.dropout to false"
    if kernel == "eager":
        return None
    if kernel in ("sdpa", "flex_attention") and soft_cap(config) is not None:
        return f"leaves out the model's soft cap (attn_logit_softcapping={soft_cap(config):g})"
    probe = copy.deepcopy(config)
    probe.dtype = dtype  # transformers warns of FlashAttention in float32, which is not requested here
    try:
        with torch.device("meta"):
            AutoModelForSequenceClassification.from_config(
                probe, attn_implementation=kernel, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        if "attention" in str(error).lower():
            return "not supported by the model"
        raise
    return None


@cache
def say_once(level: int, sentence: str) -> None:
    """Log a sentence, unless it was logged before."""
    _log.log(level, sentence)


KERNELS = ("sdpa", UNPADDED, "eager", "flex_attention", *SWITCHES)
"""Attention kernels that take a mask of any form."""


def takes_blocks(kernel: str, device: torch.device) -> bool:
    """True if shared prompts get a block mask: FlexAttention by name, or a switch that has it, on CUDA."""
    assert kernel in KERNELS, f"sharing_obstacle lets no {kernel} pass"
    return kernel == "flex_attention" or (kernel in SWITCHES and SWITCHES[kernel].has_blocks and device.type == "cuda")
