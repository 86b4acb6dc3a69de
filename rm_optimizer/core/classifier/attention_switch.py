"""Attention kernel by pass: one name for a model's layers, and the fastest kernel for the tensors of each pass.

`transformers` reads one kernel from the configuration for every pass. A reward model has passes of several kinds. Trees
of shared prompts need block masks, which only FlexAttention has. Padded pairs under autocast are fastest with
FlashAttention 2, which removes the padding. Passes in float32 need SDPA. A switch chooses the kernel for each pass by
its tensors alone, so that passes recomputed by gradient checkpointing use the same kernel again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

HALF = (torch.float16, torch.bfloat16)
"""Types that FlashAttention 2 computes in."""


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

for _name, _switch in SWITCHES.items():
    AttentionInterface.register(_name, _switch)
    AttentionMaskInterface.register(_name, _switch.mask)
