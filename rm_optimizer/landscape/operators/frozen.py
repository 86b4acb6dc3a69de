"""Model with fixed weights and modes during a measurement, restored afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.attention import soft_cap
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.parameters import ParameterSubset
from rm_optimizer.records.randomness import keeping_random_state

DIFFERENTIABLE_TWICE = ("sdpa", "eager")
"""Kernels with a second derivative: PyTorch's own restricted to its plain backend, and the model's own code."""
_HOOK = "make_inputs_require_grad"


@contextmanager
def frozen(model: BradleyTerryRM, subset: ParameterSubset) -> Iterator[None]:
    """Turn off dropout and checkpointing, and derive by a subset alone; the model keeps its attention.

    When the block ends, modes, `requires_grad`, hooks and the random generators of Python, NumPy and PyTorch are as
    they were. Gradients in `.grad` are not touched: measurements use `torch.autograd.grad`.

    Args:
        model: the model.
        subset: parameters to derive by.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(keeping_random_state())
        enter(_evaluation_mode(model))
        enter(_gradients_to(model, subset))
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(torch.autocast(model.device.type, enabled=False))
        if model.reward_head.weight.dtype == torch.float64:
            enter(KeepFloat64())
        yield


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without checkpointing and its hooks, which make the output of embeddings a leaf."""
    names = ("training", "_forward_hooks")
    with _restored([(module, name, getattr(module, name)) for module in model.modules() for name in names]):
        for module in model.eval().modules():
            hooks = module._forward_hooks.items()  # by the name that `transformers` 5 and PEFT 0.18 give them
            left = [(key, hook) for key, hook in hooks if not getattr(hook, "__name__", "").startswith(_HOOK)]
            module._forward_hooks = OrderedDict(left)
        yield


@contextmanager
def _gradients_to(model: nn.Module, subset: ParameterSubset) -> Iterator[None]:
    parameters, chosen = dict(model.named_parameters()), set(subset.names)
    with _restored([(parameter, "requires_grad", parameter.requires_grad) for parameter in parameters.values()]):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen)
        yield


@contextmanager
def attention_with(model: PreTrainedModel, kernel_of: Callable[[PreTrainedModel], str]) -> Iterator[None]:
    """Attention kernel of each part of a model from a rule, restored when the block ends; SDPA in its plain backend."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(config): config for part in parts for config in (part.config, part.config.get_text_config())}
    attribute = "_attn_implementation_internal"
    before = [(config, attribute, getattr(config, attribute, None)) for config in configs.values()]
    with _restored(before), sdpa_kernel(SDPBackend.MATH):
        for part in parts:
            kernel = kernel_of(part)
            for config in (part.config, part.config.get_text_config()):
                setattr(config, attribute, kernel)
        yield


def own_kernel(model: PreTrainedModel) -> str:
    """The model's own kernel, or its eager code where that kernel computes in half types only."""
    now = str(model.config._attn_implementation)
    return "eager" if now == "flash_attention_2" and model._can_set_attn_implementation() else now


def kernel_for_twice(model: PreTrainedModel) -> str:
    """PyTorch's attention if it computes the model; eager code of some families computes its softmax in float32.

    Raises:
        ConfigError: if the model's attention cannot be switched to a kernel of `DIFFERENTIABLE_TWICE`.
    """
    now = str(model.config._attn_implementation)
    if not model._can_set_attn_implementation():
        if now not in DIFFERENTIABLE_TWICE:
            raise ConfigError(
                f"curvature needs attention that can be differentiated twice, and {type(model).__name__} is fixed to "
                f"{now}; load it with attn_implementation=eager"
            )
        return now
    return "sdpa" if model._supports_sdpa and soft_cap(model.config) is None else "eager"


@contextmanager
def _restored(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    try:
        yield
    finally:
        for owner, name, value in attributes:
            setattr(owner, name, value)


class KeepFloat64(TorchFunctionMode):
    """Mode that turns casts to float32 into casts to float64.

    Several families compute norms, rotary angles and the softmax in float32 also inside a float64 model, which would
    leave a float64 measurement with float32's rounding.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 in the place of float32."""
        if func is Tensor.float:
            return args[0].double()
        arguments = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*arguments, **named)
