"""JSON text that every reader takes: a number that is not finite is null."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return nested mappings, sequences and numbers as JSON, with null for NaN and infinities.

    Example:
        >>> json_text({"norm": float("nan"), "values": (1.0, 2.0)})
        '{"norm": null, "values": [1.0, 2.0]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def number(value: float | None) -> float:
    """The number that `json_text` wrote; NaN for null."""
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
