"""Hydra's flags on a command line, read with Hydra's parser before Hydra runs. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import NoReturn, cast, get_type_hints

from hydra._internal.utils import get_args_parser

from rm_optimizer.errors import ConfigError, did_you_mean


def parse_flags(arguments: Sequence[str], kind: type) -> argparse.Namespace:
    """Parse Hydra's flags and the overrides.

    Args:
        arguments: arguments of the command line, without the program's name.
        kind: dataclass of the whole configuration, for the hint if an option was written with dashes.

    Raises:
        ConfigError: if a flag is unknown or lacks its value.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_args(list(arguments))
    for flag in unknown:
        if flag.startswith("-"):
            known = [name for name in parser._option_string_actions if name[1] == "-"]
            raise ConfigError(_unknown_flag(flag, kind, known))
    flags.overrides += unknown
    return flags


def flags_first(arguments: Sequence[str], kind: type) -> list[str]:
    """Move Hydra's flags before the overrides, since its parser accepts only one uninterrupted series of overrides.

    Args:
        arguments: arguments of the command line, without the program's name.
        kind: dataclass of the whole configuration, as in `parse_flags`.

    Raises:
        ConfigError: if a flag is unknown or lacks its value.

    Example:
        >>> from rm_optimizer.schema import TrainConfig
        >>> flags_first(["seed=1", "--cfg", "job", "optimizer=muon"], TrainConfig)
        ['--cfg=job', 'seed=1', 'optimizer=muon']
    """
    flags = parse_flags(arguments, kind)
    words = []
    for action in get_args_parser()._actions:
        value = getattr(flags, action.dest, None)
        if action.option_strings and value not in (None, False):
            words.append(action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]}={value}")
    return [*words, *flags.overrides]


def require_given_once(overrides: Sequence[str]) -> None:
    """Refuse an option that is set twice; Hydra would silently use the last value.

    Raises:
        ConfigError: naming the option and both values.
    """
    seen: dict[str, str] = {}
    for line in overrides:
        name, equals, value = line.partition("=")
        option = name.lstrip("+")
        if equals and seen.setdefault(option, value) != value:
            raise ConfigError(f"{option} is given twice, as {seen[option]} and as {value}; give it once")


def only_tells(flags: argparse.Namespace) -> bool:
    """True if Hydra prints information instead of running a composed configuration."""
    asks = (flags.help, flags.hydra_help, flags.shell_completion, flags.info)
    return any((*asks, flags.experimental_rerun, flags.config_path))


def _unknown_flag(flag: str, kind: type, known: Sequence[str]) -> str:
    """Sentence about an unknown flag: an option that is set without dashes, or the most similar flag."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    options = list(_options("", kind))
    meant = [option for option in options if option.rpartition(".")[2] == name]
    meant += [option for option in difflib.get_close_matches(name, options, n=1) if "." not in option]
    if meant:
        return f"unknown flag '{flag}'; options are set without dashes: {meant[0]}=VALUE"
    return did_you_mean("flag", flag, known)


def _options(prefix: str, kind: type) -> Iterator[str]:
    """Dotted names of all options; for the optimizer, only those that all optimizers share."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _options(f"{prefix}{field.name}.", cast(type, hints[field.name]))


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
