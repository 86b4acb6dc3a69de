"""The start of a program whose options Hydra composes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from rm_optimizer.interfaces.exits import one_exit


def launch(run: Callable[[Any], object], main_file: str) -> None:
    """Compose the configuration of the command line with Hydra, and run it.

    A failure inside `run` ends the process there with its sentence and exit code. Hydra lets that pass, where it would
    first announce an error in a line of its own.
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
