"""Modeling code that computes in float32 whatever it is given, kept in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Turns casts to float32 into casts to float64.

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
