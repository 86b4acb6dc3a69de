"""Hydra's flags on a command line, read with its own parser before it sees them. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from rm_optimizer.errors import ConfigError, did_you_mean


def parse_flags(arguments: Sequence[str], kind: type) -> argparse.Namespace:
    """Hydra's flags and the overrides among them.

    Args:
        arguments: what the user typed, without the program's name.
        kind: the dataclass of the whole configuration, for the hint where an option was written with dashes.

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


def only_tells(flags: argparse.Namespace) -> bool:
    """Whether Hydra answers a question rather than runs a composed configuration of ours."""
    asks = (flags.help, flags.hydra_help, flags.shell_completion, flags.info)
    return any((*asks, flags.experimental_rerun, flags.config_path))


def _unknown_flag(flag: str, kind: type, known: Sequence[str]) -> str:
    """Did-you-mean among the flags, unless the flag is the name of an option that is set without dashes."""
    meant = difflib.get_close_matches(flag.lstrip("-"), [field.name for field in fields(kind)], n=1)
    if meant:
        return f"unknown flag '{flag}'; options are set without dashes: {meant[0]}=VALUE"
    return did_you_mean("flag", flag, known)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
