"""Hydra entry: `python -m rm_optimizer.train optimizer=muon hardware=h100`.

The imports of a run stand inside the functions: help, a mistyped option and the data-loader's spawned processes, which
import this module again, need neither Hydra nor torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn

from rm_optimizer.errors import ConfigError, DataStalled, RMOptimizerError, did_you_mean

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig

    from rm_optimizer.training.result import RunResult

INTERRUPTED = 130


def main() -> None:
    """Check the command line, then let Hydra run it; a user's mistake becomes one sentence and an exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        check_command(sys.argv[1:])
        _launch()
    except RMOptimizerError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def report(error: RMOptimizerError) -> int:
    """Write the error's sentence to stderr and return the exit code.

    Every process of a distributed run meets the same mistake, so only the first speaks; a stalled data loader is met
    by one process alone, which then speaks for itself.
    """
    if _rank() == 0 or isinstance(error, DataStalled):
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def show(result: RunResult) -> None:
    """Draw the run's pictures and print its summary."""
    from rm_optimizer.reporting.pictures import draw_run, print_run

    draw_run(result)
    print_run(result)


def _rank() -> int:
    """This process's number in a distributed run, as torchrun and Lightning tell it."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def check_command(arguments: Sequence[str]) -> None:
    """Compose what the arguments ask for, without running it.

    Args:
        arguments: options and flags as Hydra takes them, without the program's name.

    Raises:
        ConfigError: if a flag, group, option or value is unknown or out of range, or the run folder cannot be written.
    """
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.schema.command_line import cells, checked

    flags = _flags(arguments)
    if (
        flags.help
        or flags.hydra_help
        or flags.shell_completion
        or flags.info
        or flags.experimental_rerun
        or flags.config_path
    ):
        return
    name = flags.config_name or "config"
    for overrides in cells(flags.overrides) if flags.multirun else [flags.overrides]:
        config = checked(overrides, TrainConfig, name=name, config_dir=flags.config_dir, writable=flags.cfg is None)
        if flags.multirun and config.hardware.devices > 1:
            raise ConfigError(
                f"--multirun takes hardware.devices=1, got {config.hardware.devices}; start one command a configuration"
            )


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags, with its parser; an unknown one is a sentence instead of a usage page."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_args(list(arguments))
    for flag in unknown:
        if flag.startswith("-"):
            raise ConfigError(_unknown_flag(flag, [name for name in parser._option_string_actions if name[1] == "-"]))
    flags.overrides += unknown
    return flags


def _unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Did-you-mean among the flags, unless the flag is the name of an option that is set without dashes."""
    from rm_optimizer.schema import TrainConfig

    meant = difflib.get_close_matches(flag.lstrip("-"), [field.name for field in fields(TrainConfig)], n=1)
    if meant:
        return f"unknown flag '{flag}'; options are set without dashes: {meant[0]}=VALUE"
    return did_you_mean("flag", flag, known)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _launch() -> None:
    import hydra

    from rm_optimizer.schema import config_root
    from rm_optimizer.schema.store import register

    register()
    hydra.main(version_base="1.3", config_path=config_root(), config_name="config")(run)()


def run(config: DictConfig) -> float:
    """Train what the composed configuration says and return what a sweep minimises.

    Raises:
        SystemExit: with the error's code, after its sentence. Hydra lets it pass; an error it would first announce
            in a line of its own.
    """
    from rm_optimizer.schema import TrainConfig, typed

    try:
        from rm_optimizer.training.run import train_reward_model

        result = train_reward_model(typed(config, TrainConfig))
        if _rank() == 0:
            show(result)
        return result.objective
    except RMOptimizerError as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
