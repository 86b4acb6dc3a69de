"""Run-time check of arrays against their annotations, where the import hook of jaxtyping meets ones that name axes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from beartype._check.code import codemain

CHECKED = (
    "core.base",
    "core.classifier",
    "core.importing",
    "core.metrics",
    "core.model",
    "core.pairs",
    "core.storage",
    "core.tokens",
    "data_efficiency",
    "doctor",
    "evaluation",
    "experiments",
    "explanation",
    "interfaces.commands",
    "landscape",
    "optim",
    "reporting",
    "rl_coupling",
    "serving.client",
    "serving.embedded",
    "serving.weights",
    "training",
)
"""Packages whose arrays are checked against their annotations on every call in the tests."""

_AXES = re.compile(r"\b(Bool|Float|Int|Shaped)\[")


def install() -> None:
    """Check functions and dataclasses of the packages, which must not be imported yet; the rest costs nothing."""
    codemain.getrandbits = random.Random(0).getrandbits  # draws the item of a sequence to check, elsewise globally
    every = jaxtyping.jaxtyped

    def where_axes_are_named(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        wrapped = every(typechecker=typechecker)
        return lambda item: wrapped(item) if any(map(_AXES.search, _annotations(item))) else item

    jaxtyping.jaxtyped = where_axes_are_named  # what the hook writes above each function and class
    jaxtyping.install_import_hook([f"rm_optimizer.{package}" for package in CHECKED], "tests.runtime_types.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check of every argument and result whose annotation names axes; mypy checks the others."""
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if _names_axes(hint)}
    return beartype(function)


def _annotations(item: Any) -> list[str]:
    """Annotations of a function or class as they are written."""
    return [str(hint) for hint in getattr(getattr(item, "__func__", item), "__annotations__", {}).values()]


def _names_axes(hint: object) -> bool:
    return (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)) or any(
        map(_names_axes, get_args(hint))
    )
