"""Log of a running server: its changes of state on standard error, with the time."""

from __future__ import annotations

import logging


def show_server_log() -> None:
    """Write the package's log from level INFO, which includes weight updates; a second call does nothing."""
    log = logging.getLogger("rm_optimizer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rm-opt serve: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
