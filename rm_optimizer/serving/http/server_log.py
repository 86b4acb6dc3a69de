"""The log of a server: what changes while it runs, on standard error, with the time."""

from __future__ import annotations

import logging


def show_server_log() -> None:
    """Write the package's log from INFO on, so that new weights leave a line; a second call does nothing."""
    log = logging.getLogger("rm_optimizer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rm-opt serve: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
