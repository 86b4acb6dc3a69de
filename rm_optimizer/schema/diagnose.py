"""Sentences for mistakes in options, with other libraries' names for ours. Imports no torch."""

from __future__ import annotations

import csv
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from rm_optimizer.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from hydra.errors import MissingConfigException, OverrideParseException

WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping {name: value}",
    list: "a list [a, b]",
    types.NoneType: "null",
}


def explain(error: BaseException, overrides: Sequence[str]) -> str:
    """One sentence for a failure of composition, naming the option as it was typed."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return _syntax_sentence(error, overrides)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _preset_sentence(error, overrides)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return _value_sentence(cause, overrides)
    if "Ambiguous value" in str(error):
        line = str(error).split("'")[1]
        return f"{line} names several values; add --multirun to run each of them, or write a list as name=[a,b]"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: not valid YAML ({error.problem})"
    return " ".join(str(error).split())


def walk_options(node: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted names in structured nodes, each with True if a dataclass declares it.

    Free mappings and lists are values, not options.
    """
    kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) and not node._is_none() else None
    if not is_dataclass(kind):
        return
    declared = {field.name for field in fields(kind)}
    for key in node:
        name = f"{prefix}{key!s}"
        yield name, key in declared
        if not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, str(key))):
            yield from walk_options(node._get_node(key), f"{name}.")


def option_names(config: DictConfig) -> Iterator[str]:
    """Dotted names of the options that the dataclasses declare."""
    return (name for name, is_declared in walk_options(config) if is_declared)


PATH_OPTIONS = {"data": "data.train", "model": "model.path"}
"""The options that take a path where a user may give one to the group of presets."""


def _preset_sentence(error: MissingConfigException, overrides: Sequence[str]) -> str:
    """Did-you-mean among the presets, or the option that takes a path where the value is one."""
    missing = str(error.missing_cfg_file)
    for group, option in PATH_OPTIONS.items():
        got = next((line.partition("=")[2] for line in overrides if line.startswith(f"{group}=")), None)
        if got is None or not missing.startswith(f"{group}/"):
            continue
        is_path = "/" in got or "." in got
        if is_path or Path(got).exists():
            path = got if is_path else f"./{got}"
            return f"{group} takes the name of a preset, got '{got}'; for the path write {option}={path}"
    group, _, name = missing.rpartition("/")
    return did_you_mean(group or "main file", name, error.options or ())


def _syntax_sentence(error: OverrideParseException, overrides: Sequence[str]) -> str:
    line = next((line for line in overrides if line == error.override), error.override)
    if "=" not in line:
        example = f"data.train={line}" if Path(line).exists() else "optimizer=adamw or data.train=pairs.jsonl"
        return f"expected option=value, got '{line}'; write for example {example}"
    name, _, value = line.partition("=")
    odd = next((letter for letter in name if not letter.isascii()), None)
    if odd is not None:
        return f"cannot read '{line}': option names are ASCII, and '{odd}' (U+{ord(odd):04X}) is not; type {name} anew"
    words = overrides[overrides.index(line) :] if line in overrides else []  # a shell divides an option at its blanks
    whole = (" ".join(words[:end]) for end in range(1, len(words) + 1))
    closed = next((text for text in whole if all(text.count(a) == text.count(b) for a, b in ("{}", "[]"))), line)
    if closed != line:
        return f"cannot read '{line}': put the whole option in quotes, '{closed}'"
    quoted = f"\"{name}='{value}'\""
    return f"cannot read '{line}': close its brackets, or put the value in quotes inside quotes, {quoted}"


def _value_sentence(error: OmegaConfBaseException, overrides: Sequence[str]) -> str:
    option = str(error.full_key or error.key)
    if isinstance(error, MissingMandatoryValue):
        return f"{option} must be given; set it with {option}=VALUE"
    if isinstance(error, InterpolationKeyError | InterpolationResolutionError):
        return f"{option} refers to another option that cannot be found or read: {_first_line(error)}"
    if isinstance(error, ValidationError):
        return _type_sentence(error, option, overrides)
    parent = error.parent_node
    if isinstance(parent, DictConfig) and not is_dataclass(OmegaConf.get_type(parent)):
        lines = (line for line in overrides if f"{option}.".startswith(f"{line.partition('=')[0]}."))
        typed_line = max(lines, key=lambda line: len(line.partition("=")[0]), default=option)
        return f"{option} is a new name in a free mapping; add it with a plus: '+{typed_line}'"
    for name in (line.partition("=")[0] for line in overrides if line.startswith(f"{option}.")):
        if (other := counterpart(name)) is not None:  # of a group that is not one of ours
            return f"unknown option '{name}'; {other}"
    root = parent._get_root() if parent is not None else None
    return unknown_option(option, root) if isinstance(root, DictConfig) else _first_line(error)


def unknown_option(option: str, root: DictConfig) -> str:
    """Did-you-mean among the options of its group, or else among options of the same name elsewhere.

    An option of another library is answered with its counterpart.
    """
    parent, _, leaf = option.rpartition(".")
    names = [name for name in option_names(root) if not name.startswith("hydra.") or option.startswith("hydra.")]
    beside = [name for name in names if name.rpartition(".")[0] == parent]
    near = nearest(leaf, [name.rpartition(".")[2] for name in beside])
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    if not near and elsewhere and counterpart(option) is None:
        return f"unknown option '{option}'; did you mean '{elsewhere[0]}'?"
    if (other := counterpart(option) or counterpart(leaf)) is not None:
        return f"unknown option '{option}'; {other}"
    return did_you_mean("option", option, beside or names)


def _type_sentence(error: ValidationError, option: str, overrides: Sequence[str]) -> str:
    """Expected kind of value and the value as typed."""
    typed = [line.partition("=")[2] for line in overrides if line.partition("=")[0].lstrip("+") == option]
    quoted = re.search(r"[Vv]alue '([^']*)'", str(error))
    got = typed[-1] if typed else quoted.group(1) if quoted else _first_line(error)
    owner, hint = error.object_type, None
    if isinstance(owner, type) and is_dataclass(owner):
        hint = get_type_hints(owner).get(option.rpartition(".")[2])
    if hint is None:
        return f"{option} does not take the value '{got}': {_first_line(error)}"
    words = []
    for kind in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return did_you_mean(option, got, [member.name for member in kind])
        if isinstance(kind, type) and is_dataclass(kind):
            words.append("a group of options, set one by one")
        else:
            words.append(WORDS.get(get_origin(kind) or kind, "of another type"))
    return f"{option} must be {' or '.join(words)}, got '{got}'"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


LIBRARIES = ("TRL", "OpenRLHF", "LLaMA-Factory")


@cache
def counterparts() -> tuple[dict[str, str], ...]:
    """Rows of the table: `ours`, `meaning`, and the names of each library, separated by blanks."""
    with Path(__file__).with_name("coming_from.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def counterpart(name: str) -> str | None:
    """Sentence about the option here that does what another library's option does; None for an unknown name.

    Example:
        >>> counterpart("num_train_epochs")
        'for num_train_epochs of TRL and LLaMA-Factory set training.epochs (passes over the pairs)'
    """
    rows = [row for row in counterparts() if any(name in row[library].split() for library in LIBRARIES)]
    libraries = [library for library in LIBRARIES if any(name in row[library].split() for row in rows)]
    options = ", or ".join(f"{row['ours']} ({row['meaning']})" for row in rows)
    return f"for {name} of {' and '.join(libraries)} set {options}" if rows else None
