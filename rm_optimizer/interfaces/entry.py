"""Entry of `rm-opt`."""

from __future__ import annotations

from rm_optimizer.interfaces.exits import one_exit


def main() -> None:
    """Run `rm-opt`; Ctrl-C during its imports is reported as later."""
    with one_exit():
        from rm_optimizer.interfaces.cli import app

        app()
