"""Engine descriptions and staged weights as JSON values, for the pipe between a server and its worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from rm_optimizer.serving.engine import EngineDescription, StagedWeights

_STAGED = TypeAdapter(StagedWeights)
_DESCRIPTION = TypeAdapter(EngineDescription)


def staged_to_json(weights: StagedWeights) -> dict[str, Any]:
    """Staged weights as JSON values."""
    values: dict[str, Any] = _STAGED.dump_python(weights, mode="json")
    return values


def staged_from_json(value: Mapping[str, Any]) -> StagedWeights:
    """The weights that `staged_to_json` wrote."""
    return _STAGED.validate_python(value)


def description_to_json(description: EngineDescription) -> dict[str, Any]:
    """A description as JSON values."""
    values: dict[str, Any] = _DESCRIPTION.dump_python(description, mode="json")
    return values


def description_from_json(value: Mapping[str, Any]) -> EngineDescription:
    """The description that `description_to_json` wrote."""
    return _DESCRIPTION.validate_python(value)
