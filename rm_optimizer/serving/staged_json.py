"""Engine descriptions and staged weights as JSON values, for the pipe between a server and its worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rm_optimizer.serving.engine import EngineDescription, StagedWeights
from rm_optimizer.serving.protocol import RewardModelTrainingMode, TensorSpec, WeightProbe


def staged_to_json(weights: StagedWeights) -> dict[str, Any]:
    """Staged weights as JSON values."""
    return {
        "version": weights.version,
        "revision": weights.revision,
        "mode": weights.mode.value,
        "file": str(weights.file),
        "tensors": [spec.model_dump() for spec in weights.tensors],
        "probe": None if weights.probe is None else weights.probe.model_dump(),
    }


def staged_from_json(value: Mapping[str, Any]) -> StagedWeights:
    """The weights that `staged_to_json` wrote."""
    return StagedWeights(
        version=value["version"],
        revision=value["revision"],
        mode=RewardModelTrainingMode(value["mode"]),
        file=Path(value["file"]),
        tensors=_specs(value["tensors"]),
        probe=None if value["probe"] is None else WeightProbe(**value["probe"]),
    )


def description_to_json(description: EngineDescription) -> dict[str, Any]:
    """A description as JSON values."""
    plain = {item.name: getattr(description, item.name) for item in fields(description) if item.name != "tensors"}
    tensors = {mode.value: [spec.model_dump() for spec in specs] for mode, specs in description.tensors.items()}
    return plain | {"tensors": tensors}


def description_from_json(value: Mapping[str, Any]) -> EngineDescription:
    """The description that `description_to_json` wrote."""
    tensors = {RewardModelTrainingMode(mode): _specs(specs) for mode, specs in value["tensors"].items()}
    return EngineDescription(**{**value, "tensors": tensors})


def _specs(values: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(**value) for value in values)
