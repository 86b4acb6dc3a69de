"""Limit on the restarts of a process, since its weights or input may be the cause of its death."""

from __future__ import annotations

import time
from collections import deque

from rm_optimizer.errors import RMOptimizerError

MOST_RESTARTS = 5
"""Most restarts within `WINDOW_SECONDS`."""
WINDOW_SECONDS = 900.0


class RestartLimit:
    """Counter of one process's restarts.

    Args:
        what: name of the process, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._times: deque[float] = deque(maxlen=MOST_RESTARTS)

    def note(self) -> None:
        """Record a restart that is about to happen.

        Raises:
            RMOptimizerError: if it is one too many.
        """
        now = time.monotonic()
        if len(self._times) == MOST_RESTARTS and now - self._times[0] < WINDOW_SECONDS:
            raise RMOptimizerError(f"{self._what} ended {MOST_RESTARTS + 1} times within {now - self._times[0]:.0f} s")
        self._times.append(now)
