"""The option reference: every field of the schema with its default and its docstring, as Markdown.

`python -m rm_optimizer.interfaces.describe` prints it. `doc.md` holds it between two marks; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from omegaconf import MISSING as UNSET

from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.store import GROUPS, OPTIMIZERS

BEGIN = "<!-- options: begin -->"
END = "<!-- options: end -->"


def option_reference() -> str:
    """A table for the options of each group."""
    groups: Mapping[str, type] = {"optimizer": OPTIMIZERS["adamw"], **GROUPS}
    parts = [_table("the run", "", TrainConfig, skip=set(groups))]
    parts += [_table(f"`{name}`", f"{name}.", kind, skip=set()) for name, kind in sorted(groups.items())]
    return "\n".join(parts)


def _table(title: str, prefix: str, kind: type, skip: set[str]) -> str:
    rows = [f"| `{name}` | {default} | {text} |" for name, default, text in _rows(prefix, kind, skip)]
    return "\n".join(
        [f"**Options of {title}**", "", "| option | default | meaning |", "| --- | --- | --- |", *rows, ""]
    )


def _rows(prefix: str, kind: type, skip: set[str]) -> Iterator[tuple[str, str, str]]:
    texts, hints = field_docs(kind), get_type_hints(kind)
    for item in fields(kind):
        if item.name in skip:
            continue
        if is_dataclass(hints[item.name]):
            yield from _rows(f"{prefix}{item.name}.", hints[item.name], set())
        else:
            yield f"{prefix}{item.name}", _default(item), texts.get(item.name, "").replace("|", "\\|")


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if value == UNSET or value is MISSING:
        return "preset"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return "null" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, its bases included."""
    found: dict[str, str] = {}
    for base in reversed([part for part in kind.__mro__ if is_dataclass(part)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef), "a dataclass is a class"
        for before, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[before.target.id] = " ".join(str(text).split())
    return found


if __name__ == "__main__":
    print(option_reference())
