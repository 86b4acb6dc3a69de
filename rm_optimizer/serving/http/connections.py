"""Limits on connections, so that a flood exhausts neither the process's open files nor the disk of its log."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass
from typing import Any

MAX_CONNECTIONS = 2048
"""Most open connections, if the limit of open files allows as many."""
MAX_BACKLOG = 128
"""Most connections that wait to be accepted, in addition to the open ones."""
RESERVED_FILES = 64
"""Files for everything but connections."""
REPORT_SECONDS = 60.0
"""Least time between two reports that there are no more files."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections of a server.

    Args:
        open: connections that are served; a further one gets 503 and is closed.
        backlog: connections that wait to be accepted.
    """

    open: int
    backlog: int

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        """Limits for this process's open files, after raising their limit as far as the system allows."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
            except (ValueError, OSError):  # macOS: more than the kernel has
                pass
        return cls.of_files(soft if soft != resource.RLIM_INFINITY else 2**20)

    @classmethod
    def of_files(cls, files: int) -> ConnectionLimits:
        """Limits for this number of open files.

        Example:
            >>> ConnectionLimits.of_files(1024)
            ConnectionLimits(open=832, backlog=128)
        """
        backlog = max(8, min(MAX_BACKLOG, files // 8))
        return cls(max(16, min(MAX_CONNECTIONS, files - RESERVED_FILES - backlog)), backlog)


def report_lack_of_files_once(loop: asyncio.AbstractEventLoop) -> None:
    """Log `accept() out of system resource` once a minute; asyncio logs it for each connection that waits."""
    last = -REPORT_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "out of system resource" in str(context.get("message")):
            if time.monotonic() - last < REPORT_SECONDS:
                return
            last = time.monotonic()
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
