"""Names of a package that load on first use and keep their types."""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any


def export_lazily(package: dict[str, Any]) -> None:
    """Give a package the names that it imports `X as X` under `if TYPE_CHECKING:`; each loads on first use.

    Type checkers and editors read these imports directly. At run time they are parsed from the package's source, so
    that the names are written only once (like the stubs of `lazy_loader.attach_stub`, scientific Python's SPEC 1).

    Args:
        package: the package's `globals()`.
    """
    name = package["__name__"]
    homes = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(package["__spec__"].loader.get_source(name)))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname == alias.name
    }

    def load(wanted: str) -> Any:
        if wanted not in homes:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return getattr(import_module(homes[wanted]), wanted)

    package["__all__"] = sorted(homes)
    package["__getattr__"] = load
    package["__dir__"] = lambda: sorted({*package, *homes})
