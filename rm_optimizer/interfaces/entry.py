"""Entry of `rm-opt`."""

from __future__ import annotations

import os
import sys

from rm_optimizer.interfaces.exits import one_exit


def main() -> None:
    """Run `rm-opt`; Ctrl-C during its imports is reported as later."""
    try:
        with one_exit():
            from rm_optimizer.interfaces.cli import app

            app()
    except SystemExit as end:
        _leave(end.code)
        raise
    _leave(0)


def _leave(code: object) -> None:
    """End a process of torchrun at once.

    A thread of torch.distributed may still run when Python unloads its library, which then aborts.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") and isinstance(code, int | None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
