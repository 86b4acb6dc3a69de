"""Backbones in four bits through bitsandbytes: NF4, quantized twice (Dettmers et al., 2023, arXiv 2305.14314)."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from rm_optimizer.core.classifier.head import head_side_modules
from rm_optimizer.errors import MissingExtra
from rm_optimizer.records.accelerator import accelerators

logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)
"""bitsandbytes warns at its import of a missing kernel for processors, which `keep_packing` leaves out anyway."""


def quantization_arguments(config: PretrainedConfig, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Arguments of `from_pretrained` to store a backbone's matrices in four bits, head-side modules excluded.

    Raises:
        MissingExtra: if bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "qlora")
    computes: torch.dtype = torch.float32
    device: int | str = "cpu"
    if found := accelerators():
        has_half = torch.get_device_module(found[0]).is_bf16_supported()
        computes = torch.bfloat16 if has_half else torch.float16
        device = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
    with torch.device("meta"):
        skeleton = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    storage = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # the constants are quantized once more
        bnb_4bit_compute_dtype=computes,
        llm_int8_skip_modules=list(head_side_modules(skeleton)),
    )
    return {"quantization_config": storage, "device_map": {"": device}}


def is_quantized(model: PreTrainedModel) -> bool:
    """True if matrices of the model are stored in four bits."""
    return any(is_packed(module) for module in model.modules())


def is_packed(module: nn.Module) -> bool:
    """True if a layer's weight is stored in four bits."""
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def keep_packing(model: PreTrainedModel) -> PreTrainedModel:
    """Keep matrices in four bits as they were read.

    At the first evaluation on a processor with AVX512-BF16, bitsandbytes (0.50) repacks them for a kernel in bfloat16,
    after which rewards differ from training's in the second digit.
    """
    for module in filter(is_packed, model.modules()):
        module.support_avx512bf16_for_cpu = False
    return model


def unpacked(module: nn.Module) -> dict[str, Tensor]:
    """Weight and bias of a layer stored in four bits, in the type they had before."""
    dequantize = import_module("bitsandbytes.functional").dequantize_4bit
    weight, bias = cast("Any", module.weight), cast("Tensor | None", module.bias)
    state = {"weight": dequantize(weight.data, weight.quant_state).to(weight.quant_state.dtype)}
    # A forward pass of bitsandbytes casts the bias's data in place: after `score` they are an inference tensor.
    return state if bias is None else state | {"bias": bias.detach().clone()}


def parameter_size(parameter: nn.Parameter) -> int:
    """Number of entries of a parameter; two share a byte in four bits."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def reading_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `from_pretrained` to read a base as a model holds it: in four bits on its device, or none."""
    if not is_quantized(model):
        return {}
    return {"quantization_config": model.config.quantization_config, "device_map": {"": model.device}}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type of a backbone's matrix products outside autocast, which bounds how exact its rewards are."""
    quantization = getattr(model.config, "quantization_config", None)
    dtype = getattr(quantization, "bnb_4bit_compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else model.dtype
