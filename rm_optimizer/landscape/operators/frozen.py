"""Model with fixed weights and modes during a measurement, restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.parameters import ParameterSubset
from rm_optimizer.records.randomness import keeping_random_state

DIFFERENTIABLE_TWICE = ("sdpa", "eager")
"""Kernels with a second derivative: PyTorch's own restricted to its plain backend, and the model's own code."""


@contextmanager
def frozen(model: BradleyTerryRM, subset: ParameterSubset, *, twice: bool = True) -> Iterator[None]:
    """Turn off dropout and checkpointing, differentiate attention twice, and derive by a subset alone.

    When the block ends, modes, `requires_grad`, the attention kernel and the random generators of Python, NumPy and
    PyTorch are as they were. Gradients in `.grad` are not touched: measurements use `torch.autograd.grad`.

    Args:
        model: the model.
        subset: parameters to derive by.
        twice: True for second derivatives; otherwise the model keeps its attention.

    Raises:
        ConfigError: if the model's attention cannot be switched to a kernel of `DIFFERENTIABLE_TWICE`.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(keeping_random_state())
        enter(_evaluation_mode(model))
        enter(_gradients_to(model, subset))
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(torch.autocast(model.device.type, enabled=False))
        if twice:
            enter(_plain_attention(model.model))
            enter(sdpa_kernel(SDPBackend.MATH))
        if model.reward_head.weight.dtype == torch.float64:
            enter(KeepFloat64())
        yield


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which `transformers` does not checkpoint gradients either."""
    with _restored([(module, "training", module.training) for module in model.modules()]):
        model.eval()
        yield


@contextmanager
def _gradients_to(model: nn.Module, subset: ParameterSubset) -> Iterator[None]:
    parameters, chosen = dict(model.named_parameters()), set(subset.names)
    with _restored([(parameter, "requires_grad", parameter.requires_grad) for parameter in parameters.values()]):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen)
        yield


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(config): config for part in parts for config in (part.config, part.config.get_text_config())}
    attribute = "_attn_implementation_internal"
    with _restored([(config, attribute, getattr(config, attribute, None)) for config in configs.values()]):
        for part in parts:
            kernel = _kernel(part)
            for config in (part.config, part.config.get_text_config()):
                setattr(config, attribute, kernel)
        yield


def _kernel(model: PreTrainedModel) -> str:
    """PyTorch's attention if the model supports it; eager code of some families computes its softmax in float32."""
    now = str(model.config._attn_implementation)
    if not model._can_set_attn_implementation():
        if now not in DIFFERENTIABLE_TWICE:
            raise ConfigError(
                f"curvature needs attention that can be differentiated twice, and {type(model).__name__} is fixed to "
                f"{now}; load it with attn_implementation=eager"
            )
        return now
    return "sdpa" if model._supports_sdpa else "eager"


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
