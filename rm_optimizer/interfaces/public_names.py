"""The public names as Markdown tables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rm_optimizer import PUBLIC_MODULES


def public_names() -> str:
    """Table of the names of `rm_optimizer` with meanings, and for each other module a table of its further names."""
    described: set[str] = set()
    parts = []
    for module in PUBLIC_MODULES:
        loaded = import_module(module)
        again = [f"`{name}`" for name in loaded.__all__ if name in described]
        rows = [f"| `{name}` | {_meaning(getattr(loaded, name))} |" for name in loaded.__all__ if name not in described]
        parts += [f"**`{module}`**" + (f", beside {', '.join(again)}" if again and rows else ""), ""]
        parts += ["| name | meaning |", "| --- | --- |", *rows, ""] if rows else [", ".join(again), ""]
        described |= set(loaded.__all__)
    return "\n".join(parts)


def _meaning(value: Any) -> str:
    """First sentence of a docstring; for a dictionary, its keys."""
    if isinstance(value, Mapping):
        return ", ".join(f"`{key}`" for key in value)
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".").replace("|", "\\|")
