"""Command groups that report a user's mistake in one sentence and exit with a code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rm_optimizer.errors import ConfigError, Interrupted, did_you_mean
from rm_optimizer.interfaces.exits import one_exit

HYDRA_SHORT = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-sc": "--shell-completion"}
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Click's `UsageError`; recent versions of typer contain their own copy of click."""


class Commands(TyperGroup):
    """A group that lists its commands under headings and suggests a name for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command named by the first argument.

        Raises:
            ConfigError: if there is none.
        """
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise ConfigError(did_you_mean("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings."""
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        limit = formatter.width - 6 - max(map(len, commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(limit)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


DEFAULT = "side-by-side"
"""Command of `rm-opt compare` that runs if none is named."""
OF_OPTIMIZERS = "optimizers"
"""Command of `rm-opt compare` that runs if none is named and `--optimizers` is given."""


class DefaultCommands(Commands):
    """A group whose command may be omitted: `compare RUN RUN`, and `compare --optimizers A,B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command if none is named.

        Raises:
            ConfigError: if the first word is a command and also a folder here.
        """
        if args and args[0] in self.commands and Path(args[0]).is_dir():
            raise ConfigError(f"'{args[0]}' is a command and a folder here; write ./{args[0]} for the folder")
        if args and args[0] not in (*self.commands, "-h", "--help"):
            of_optimizers = any(word.partition("=")[0] == f"--{OF_OPTIMIZERS}" for word in args)
            args = [OF_OPTIMIZERS if of_optimizers else DEFAULT, *args]
        return super().parse_args(ctx, args)


class RootCommands(Commands):
    """The group of `rm-opt` itself, in which every command starts and ends."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run the command line and end the process with the exit code; a user's mistake becomes one sentence.

        Raises:
            SystemExit: always.
        """
        with one_exit():
            try:
                code = super().main(*args, **options | {"standalone_mode": False})
            except USAGE_ERROR as error:
                if not args and type(error).__name__ == "NoArgsIsHelpError":
                    error.show()
                    sys.exit(error.exit_code)
                text = " ".join(error.format_message().split()).rstrip(".")
                if found := re.match(r"Invalid value for '([^']+)': .*?'([^']*)' is not one of '(.+)'", text):
                    raise ConfigError(did_you_mean(found[1], found[2], found[3].split("', '"))) from error
                command = error.ctx.command_path if error.ctx is not None else "rm-opt"
                told = f"{text[:1].lower()}{text[1:]}; {command} --help lists what there is"
                raise ConfigError(told) from error
            if code == Interrupted.exit_code:  # typer returns it for Ctrl-C, without a message
                raise Interrupted("stopped")
        sys.exit(code)


class HydraCommand(TyperCommand):
    """Command that passes unknown arguments on to Hydra and keeps Hydra's two-letter flags whole."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write Hydra's two-letter flags in full, so that `-cd DIR` is not read as `-c -d DIR`."""
        return super().parse_args(ctx, [HYDRA_SHORT.get(word, word) for word in args])
