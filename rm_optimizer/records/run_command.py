"""Command that repeats a run's training, from its recorded options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.quoting import as_value, shell_word
from rm_optimizer.records.run_options import FREE, flat, is_among, options_of
from rm_optimizer.schema import TrainConfig, compose, typed

_UNUSED = ("output_dir", "resume", "publish")
_BASE = ("hardware=cpu", "output_dir=OUTPUT")


def run_command(options: Mapping[str, Any]) -> str:
    """`rm-opt train` with the presets of a run and every option that differs from them.

    The run folder and options that change no result, such as the loggers', are left out.

    Args:
        options: the run's `options.json`.

    Example:
        >>> from rm_optimizer.schema import TrainConfig, compose, typed
        >>> config = typed(compose(["model=tiny", "hardware=cpu", "seed=3", "output_dir=x"]), TrainConfig)
        >>> run_command(options_of(config))
        'rm-opt train model=tiny optimizer=adamw schedule=cosine hardware=cpu seed=3'
    """
    groups = [f"{group}={options[group]['name']}" for group in ("model", "optimizer", "schedule")]
    try:
        presets = _composed(groups)
    except ConfigError:  # no preset here has the model's name
        groups[0] = "model=custom"
        presets = _composed([*groups, "model.path=MODEL"])
    changed = [
        f"{name}={_text(value)}"
        for name, value in sorted(flat(dict(options)))
        if not is_among(name, (*FREE, *_UNUSED)) and presets.get(name, ...) != value
    ]
    return " ".join(["rm-opt", "train", *map(shell_word, [*groups, _BASE[0], *changed])])


def _composed(groups: list[str]) -> dict[str, Any]:
    return dict(flat(options_of(typed(compose([*groups, *_BASE]), TrainConfig))))


def _text(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, str):
        return as_value(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)
