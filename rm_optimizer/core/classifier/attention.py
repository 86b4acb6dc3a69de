"""Choice of the attention kernel: the fastest that the model and the machine support."""

from __future__ import annotations

import copy
import logging
from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from rm_optimizer.core.classifier.attention_switch import HALF, AttentionSwitch
from rm_optimizer.errors import ConfigError, did_you_mean

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
    if requested not in ("auto", *CHAIN):
        raise ConfigError(did_you_mean("model.attn_implementation", requested, ("auto", *CHAIN)))
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
                _say_once(level, f"attention uses {kernel}: {'; '.join(reasons)}")
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
    blocks = _flex_obstacle(config, trust_remote_code)
    varlen = _obstacle(config, "flash_attention_2", torch.bfloat16, trust_remote_code)
    if blocks is not None:
        _say_once(logging.INFO, f"shared prompts use sdpa with a dense mask: flex_attention: {blocks}")
    if varlen is not None:
        _say_once(level, f"padded sequences use sdpa: flash_attention_2: {varlen}")
    return AttentionSwitch(has_blocks=blocks is None, has_varlen=varlen is None).name


def _flex_obstacle(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    text = config.get_text_config()
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if channels < LEAST_HEAD_DIM:
        return f"needs heads of at least {LEAST_HEAD_DIM} channels, these have {channels}"
    if getattr(text, "attention_dropout", 0.0):
        return "has no dropout, set model.dropout to false"
    return _obstacle(config, "flex_attention", torch.float32, trust_remote_code)


def _obstacle(config: PretrainedConfig, kernel: str, dtype: torch.dtype, trust_remote_code: bool) -> str | None:
    if kernel == "flash_attention_2":
        if not torch.cuda.is_available():
            return "needs a CUDA device"
        if not is_flash_attn_2_available():
            return "the flash-attn package is not installed"
        if dtype not in HALF:
            return f"needs weights in float16 or bfloat16, these are {str(dtype).removeprefix('torch.')}"
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
def _say_once(level: int, sentence: str) -> None:
    _log.log(level, sentence)
