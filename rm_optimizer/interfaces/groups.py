"""Command groups that answer a user's mistake with one sentence and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rm_optimizer.errors import ConfigError, RMOptimizerError, did_you_mean

HYDRA_SHORT = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-sc": "--shell-completion"}


class Commands(TyperGroup):
    """A group whose unknown commands get a suggestion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names.

        Raises:
            ConfigError: if there is none.
        """
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise ConfigError(did_you_mean("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


class RootCommands(Commands):
    """The group of `rm-opt` itself: every failure with a remedy ends here."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a user's mistake becomes its sentence, Ctrl-C an exit code."""
        from rm_optimizer.train import INTERRUPTED, report

        try:
            return super().invoke(ctx)
        except RMOptimizerError as error:
            raise typer.Exit(report(error)) from error
        except KeyboardInterrupt as stop:
            raise typer.Exit(INTERRUPTED) from stop


class PassedOn(TyperCommand):
    """A command that leaves what it does not know to Hydra, whose two-letter flags it must not take apart."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write Hydra's two-letter flags in full, so that `-cd DIR` is not read as `-c -d DIR`."""
        return super().parse_args(ctx, [HYDRA_SHORT.get(word, word) for word in args])
