"""Which attention kernel a model gets: the fastest that it and the machine have."""

from __future__ import annotations

import copy
import logging
from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from rm_optimizer.errors import ConfigError, did_you_mean

CHAIN = ("flash_attention_2", "sdpa", "eager")
"""Kernels from fastest to most general; each falls back to the next."""
_log = logging.getLogger("rm_optimizer")


def choose_attention(
    config: PretrainedConfig, requested: str, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> str:
    """The first kernel of `CHAIN`, from the requested one on, that the model and this machine have.

    `auto` starts at the top, and takes FlashAttention only for weights in a half type, since it computes in no other.
    What was passed over, and why, is logged once: as a warning where it was asked for by name.

    Args:
        config: the model's configuration; not changed.
        requested: `auto` or a kernel's name.
        dtype: type of the weights.
        trust_remote_code: run modelling code that the checkpoint brings.

    Raises:
        ConfigError: if the name is unknown.
    """
    if requested not in ("auto", *CHAIN):
        raise ConfigError(did_you_mean("model.attn_implementation", requested, ("auto", *CHAIN)))
    candidates = CHAIN[CHAIN.index(requested) :] if requested in CHAIN else CHAIN
    reasons: list[str] = []
    for kernel in candidates:
        obstacle = _obstacle(config, kernel, dtype, by_name=kernel == requested, trust_remote_code=trust_remote_code)
        if obstacle is None:
            if reasons:
                level = logging.INFO if requested == "auto" else logging.WARNING
                _say_once(level, f"attention uses {kernel}: {'; '.join(reasons)}")
            return kernel
        reasons.append(f"{kernel}: {obstacle}")
    raise AssertionError("every model has eager attention")


def _obstacle(
    config: PretrainedConfig, kernel: str, dtype: torch.dtype, *, by_name: bool, trust_remote_code: bool
) -> str | None:
    if kernel == "flash_attention_2":
        if not torch.cuda.is_available():
            return "needs a CUDA device"
        if not is_flash_attn_2_available():
            return "the flash-attn package is not installed"
        if dtype not in (torch.float16, torch.bfloat16) and not by_name:
            return f"needs weights in float16 or bfloat16, these are {str(dtype).removeprefix('torch.')}"
    if kernel == "eager":
        return None
    try:
        with torch.device("meta"):
            AutoModelForSequenceClassification.from_config(
                copy.deepcopy(config), attn_implementation=kernel, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        if "attention" in str(error).lower():
            return "not supported by the model"
        raise
    return None


@cache
def _say_once(level: int, sentence: str) -> None:
    _log.log(level, sentence)
