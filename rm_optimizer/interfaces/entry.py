"""Entries of the programs: `rm-opt`, and those whose options Hydra composes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from rm_optimizer.interfaces.exits import one_exit


def main() -> None:
    """Run `rm-opt`; Ctrl-C during its imports is reported as later."""
    with one_exit():
        from rm_optimizer.interfaces.cli import app

        app()


def launch(run: Callable[[Any], object], main_file: str) -> None:
    """Compose the configuration of the command line with Hydra, and run it.

    A failure inside `run` ends the process there with its sentence and exit code. Hydra lets an exit pass, but would
    print a line of its own before an exception.
    """
    import hydra

    from rm_optimizer.schema import config_root
    from rm_optimizer.schema.store import register

    @wraps(run)
    def reported(config: Any) -> object:
        with one_exit():
            return run(config)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    register()
    hydra.main(version_base="1.3", config_path=config_root(), config_name=main_file)(reported)()
