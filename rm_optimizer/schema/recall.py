"""What a run folder records of its options, as overrides for a command that looks at the run. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.config import LossConfig
from rm_optimizer.schema.data import DataConfig
from rm_optimizer.schema.diagnose import explain
from rm_optimizer.schema.run_folder import read_options


def run_folder_of(checkpoint: str) -> Path | None:
    """The run folder that a checkpoint belongs to: itself, or the folder of its `best/` or `checkpoints/`."""
    path = Path(checkpoint).expanduser()
    return next((folder for folder in (path, *path.parents[:2]) if read_options(folder)), None)


def recalled(overrides: Sequence[str]) -> list[str]:
    """Overrides for what the user did not set: the run's data, loss and seed, and a folder in it for the results.

    Where the user names pairs of his own, none of the run's ways of reading pairs are taken.

    Args:
        overrides: what the user typed, `checkpoint=…` among it.

    Raises:
        ConfigError: if an override cannot be read.
    """
    typed = _typed(overrides)
    checkpoint = typed.get("checkpoint")
    folder = run_folder_of(str(checkpoint)) if checkpoint is not None else None
    if folder is None:
        return []
    options = read_options(folder)
    values: dict[str, Any] = {"seed": options["seed"]}
    values |= _flat("loss", options["loss"], LossConfig)
    if "data.train" not in typed:
        values |= {"split": "train"} | _flat("data", options["data"], DataConfig)
    found = [f"{name}={written(value)}" for name, value in values.items()]
    return [*found, f"output_dir={written(str(folder))[:-1]}/landscape/${{landscape.type}}'"]


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
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", str(value))) + "'"


def _typed(overrides: Sequence[str]) -> dict[str, Any]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(explain(error, overrides)) from error
    return {item.key_or_group: item.value() for item in parsed}


def _flat(prefix: str, values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Dotted names and values of the fields that the dataclass still has."""
    return dict(_leaves(prefix, values, kind))


def _leaves(prefix: str, values: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in values:
            continue
        name = f"{prefix}.{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _leaves(name, values[field.name], hints[field.name])
        else:
            yield name, values[field.name]
