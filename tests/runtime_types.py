"""Run-time check of arrays against their annotations, as the import hook of jaxtyping applies it to each function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from beartype._check.code import codemain
from jaxtyping import AbstractArray

codemain.getrandbits = random.Random(0).getrandbits  # draws the item of a sequence to check, elsewise globally


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check of every argument and result whose annotation names axes; mypy checks the others."""
    hints = {name: hint for name, hint in function.__annotations__.items() if _names_axes(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def _names_axes(hint: object) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_names_axes, get_args(hint)))
