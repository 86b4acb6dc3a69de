"""Conversion of dataclasses to JSON and back by the types of their fields; a number that is not finite is null."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from html import escape
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rm_optimizer.records.run_options import flat

NOT_STORED = MappingProxyType({"is_stored": False})
"""Metadata of a field that the JSON leaves out; it needs a default."""
OMITTED_EMPTY = MappingProxyType({"is_omitted_empty": True})
"""Metadata of a field that the JSON leaves out if it is empty; an empty value must be its default."""

REPR_WIDTH, REPR_LINES = 100, 12
"""Most columns and lines of a record's `repr`."""
_MOST_ITEMS = 12

ValueT = TypeVar("ValueT")


class RepeatedKey(ValueError):
    """Error for JSON in which an object holds a key twice; Python keeps the last value."""

    def __init__(self, key: str, count: int) -> None:
        self.key = key[:64].encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be written
        super().__init__(f"expected each key of an object once, got {self.key!r} {count} times")


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text whose objects hold each key once.

    Raises:
        RepeatedKey: if an object holds a key twice.
        ValueError: if the text is not JSON.
        RecursionError: if the values are nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object_of)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKey(*Counter(key for key, _ in pairs).most_common(1)[0])
    return found


class JsonRecord:
    """Frozen dataclass with `to_json` and `from_json`.

    Args:
        indent: spaces of each level of the text; None writes one line.
        ensure_ascii: True to escape all characters beyond ASCII.
        rows: field or method with the rows of `to_pandas`; empty for one row of the fields.
    """

    _form: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    _rows: ClassVar[str] = ""

    def __init_subclass__(cls, *, indent: int | None = None, ensure_ascii: bool = True, rows: str = "") -> None:
        cls._form, cls._rows = MappingProxyType({"indent": indent, "ensure_ascii": ensure_ascii}), rows
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # else the dataclass writes one of any length

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

    def summary(self) -> dict[str, str]:
        """The fields in a few words each, without those that are empty."""
        return {name: text for name, value in _stored(self).items() if (text := _in_words(value))}

    def __repr__(self) -> str:
        values = _stored(self)
        if not any(map(_is_nested, values.values())):
            whole = f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
            if len(whole) <= REPR_WIDTH and "\n" not in whole:
                return whole
        lines = [f"  {name}: {' '.join(text.split())}" for name, text in self.summary().items()]
        if (rest := len(lines) - (REPR_LINES - 1)) > 0:
            lines[REPR_LINES - 2 :] = [f"  … {rest + 1} more; to_json() has all"]
        cut = (line if len(line) <= REPR_WIDTH else f"{line[: REPR_WIDTH - 1]}…" for line in lines)
        return "\n".join([type(self).__name__, *cut])

    def _repr_html_(self) -> str:
        """The fields as a table, which a notebook shows."""
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.summary().items())
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"

    def plot(self) -> Any:
        """Figure of matplotlib that shows the record, as the commands draw it; a notebook shows it.

        Raises:
            TypeError: if no figure shows records of this kind.
        """
        from rm_optimizer.reporting.results import figure_of  # a higher floor, and a record does not load matplotlib

        return figure_of(self)

    def to_pandas(self) -> Any:
        """Data frame with the rows of the record; one without rows gives one row of its fields.

        Columns of nested fields have dotted names, such as `accuracy.low`.
        """
        import pyarrow as pa

        found = getattr(self, self._rows) if self._rows else None
        rows = [self.entries()] if found is None else json_values(list(found() if callable(found) else found))
        return pa.Table.from_pylist([dict(flat(row)) for row in rows]).to_pandas()


def _in_words(value: Any) -> str:
    """A value in one line: a number, a short text, or a count of items."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"{len(value):,} items" if len(value) > _MOST_ITEMS else ", ".join(map(_in_words, value))
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        value = {name: item for name, item in _stored(value).items() if item is not None and not _is_nested(item)}
    elif isinstance(value, Mapping) and (len(value) > _MOST_ITEMS or any(map(_is_nested, value.values()))):
        return f"{len(value):,} items"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(item)}" for name, item in value.items())
    return "" if value is None else " ".join(str(value).split())


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


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
        return {name: json_values(item) for name, item in _stored(value).items()}
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


def _stored(record: Any) -> dict[str, Any]:
    """Values of the fields that are stored, by name; fields of `OMITTED_EMPTY` only if they are not empty."""
    kind = cast("Any", type(record))
    values = {name: getattr(record, name) for name in _hints(kind)}
    return {name: value for name, value in values.items() if name not in _omitted_empty(kind) or value}


@cache
def _omitted_empty(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if field.metadata == OMITTED_EMPTY)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields that are stored, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.metadata.get("is_stored", True)}
