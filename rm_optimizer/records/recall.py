"""Recorded options of a run, as overrides for a command that uses one of its checkpoints. Imports no torch."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.records.run_options import paths_of
from rm_optimizer.schema.composition import by_option
from rm_optimizer.schema.config import LossConfig
from rm_optimizer.schema.data import DataConfig


def recalled(overrides: Sequence[str]) -> list[str]:
    """Overrides for options that the user did not set: the run's data, loss and seed, and a results folder inside it.

    Paths of the run's pairs are the absolute ones from the start of the run, so that they do not depend on the present
    directory. If the user names other pairs, none of the run's data options are used.

    Args:
        overrides: overrides of the command line, `checkpoint=…` included.

    Raises:
        ConfigError: if an override cannot be read, or the run's pairs are no longer where they were.
    """
    typed = by_option(overrides)
    checkpoint = typed["checkpoint"].value() if "checkpoint" in typed else None
    run = RunFolder.of(str(checkpoint)) if checkpoint is not None else None
    if run is None:
        return []
    options = run.options
    values: dict[str, Any] = {"seed": options["seed"]}
    values |= dict(_leaves("loss", options["loss"], LossConfig))
    if "data.train" not in typed:
        values |= {"split": "train", **dict(_leaves("data", {**options["data"], **recorded_sources(run)}, DataConfig))}
    found = [f"{name}={written(value)}" for name, value in values.items()]
    return [*found, f"output_dir={written(str(run.landscape(str(checkpoint), '${landscape.type}')))}"]


def recorded_sources(run: RunFolder) -> dict[str, Any]:
    """The run's `train` and `val` with the absolute paths from its start; empty if they were not recorded.

    Raises:
        ConfigError: if a path no longer exists, or the pairs came from memory.
    """
    identity = run.identity
    if identity is None:
        return {}
    if not identity.sources:
        raise ConfigError(
            f"the run in {run.path} was trained on pairs in memory, which no file holds; name pairs with --data PAIRS "
            "(data.train=PAIRS)"
        )
    for path in (path for source in identity.sources.values() for path in paths_of(source)):
        if os.path.isabs(path) and not glob.has_magic(path) and not os.path.exists(path):
            raise ConfigError(
                f"{path}, which the run in {run.path} was trained on, is no longer there; bring it back, or name pairs "
                "with --data PAIRS (data.train=PAIRS)"
            )
    return dict(identity.sources)


def written(value: Any) -> str:
    r"""A value in Hydra's grammar.

    Example:
        >>> written({"path": "it's.csv", "weight": 2.0}), written([None, True])
        ("{path: 'it\\'s.csv', weight: 2.0}", '[null, true]')
    """
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(written, value)) + "]"
    return in_quotes(str(value))


def _leaves(prefix: str, values: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of the fields that the dataclass still has."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in values:
            continue
        name = f"{prefix}.{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _leaves(name, values[field.name], hints[field.name])
        else:
            yield name, values[field.name]
