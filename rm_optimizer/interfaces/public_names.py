"""The public names as Markdown tables: `python -m rm_optimizer.interfaces.public_names` prints them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from rm_optimizer import PUBLIC_MODULES

BEGIN = "<!-- public names: begin -->"
END = "<!-- public names: end -->"


def public_names() -> str:
    """A table of the names of each public module with what they are."""
    return "\n".join(_table(module) for module in PUBLIC_MODULES)


def _table(module: str) -> str:
    loaded = import_module(module)
    rows = [f"| `{name}` | {_summary(getattr(loaded, name))} |" for name in sorted(loaded.__all__)]
    return "\n".join([f"**`{module}`**", "", "| name | meaning |", "| --- | --- |", *rows, ""])


def _summary(value: Any) -> str:
    """First sentence of a docstring; for a table of values, its keys."""
    if isinstance(value, dict):
        return ", ".join(f"`{key}`" for key in value)
    first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", first)[0].rstrip(".:;").replace("|", "\\|")


if __name__ == "__main__":
    print(public_names())
