"""Conversion of dataclasses to JSON and back by the types of their fields; a number that is not finite is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

NOT_STORED = MappingProxyType({"is_stored": False})
"""Metadata of a field that the JSON leaves out; it needs a default."""

ValueT = TypeVar("ValueT")


class JsonRecord:
    """Frozen dataclass with `to_json` and `from_json`.

    Args:
        indent: spaces of each level of the text; None writes one line.
        ensure_ascii: True to escape all characters beyond ASCII.
    """

    _form: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls, *, indent: int | None = None, ensure_ascii: bool = True) -> None:
        cls._form = MappingProxyType({"indent": indent, "ensure_ascii": ensure_ascii})

    def entries(self) -> dict[str, Any]:
        """The entries of the JSON object: the fields, and any entries that a class adds for other readers."""
        return cast("dict[str, Any]", json_values(self))

    def to_json(self) -> str:
        """The record as JSON text; a number that is not finite is null."""
        return json.dumps(self.entries(), allow_nan=False, **self._form)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that `to_json` wrote; entries that are not fields are ignored.

        Raises:
            ValueError: if the text is not JSON, or an entry is not one of its field's choices.
            TypeError: if an entry is missing, or its field needs a list or an object and it is neither.
        """
        return from_values(cls, json.loads(text))


def json_values(value: Any) -> Any:
    """Return dataclasses, mappings, sequences, enums and paths as JSON values.

    Example:
        >>> json_values({"norm": float("nan"), "values": (1.0, Path("a"))})
        {'norm': None, 'values': [1.0, 'a']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: json_values(getattr(value, name)) for name in _hints(type(value))}
    return str(value) if isinstance(value, Path) else value


def from_values(kind: type[ValueT], values: Any) -> ValueT:
    """Read back what `json_values` returned for a value of a type.

    A null becomes NaN if its field is a float. A missing entry gets the field's default. Entries that are not fields
    are ignored.

    Raises:
        ValueError: if an entry is not one of its field's choices.
        TypeError: if an entry is missing, or its field needs a list or an object and it is neither.

    Example:
        >>> from_values(tuple[float, ...], [1.0, None])
        (1.0, nan)
    """
    return cast("ValueT", _read(kind, values))


def _read(kind: Any, value: Any) -> Any:
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in parameters else _read(_alternative(parameters, value), value)
    if kind is float:
        return math.nan if value is None else value
    if origin is tuple:
        kinds = parameters[:1] * len(value) if parameters[-1] is Ellipsis else parameters
        return tuple(_read(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _read(parameters[1], item) for key, item in dict(value).items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: _read(hint, value[name]) for name, hint in _hints(kind).items() if name in value})
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum | Path) else value


def _alternative(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first of a union's types that fits a value: a nested type for an object or a list, else a plain one."""
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    is_nested = isinstance(value, dict | list)
    return next((kind for kind in kinds if is_nested == (is_dataclass(kind) or get_origin(kind) is not None)), kinds[0])


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields that are stored, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.metadata.get("is_stored", True)}
