"""Child processes: their end with the parent, and a limit on their restarts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque

from rm_optimizer.errors import RMOptimizerError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, also after an `exec`; Linux only.

    A process that leads no session and whose parent is in another one has lost its parent already. SIGTERM is not
    enough: vLLM 0.32 hangs on one that arrives while it starts.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    session = os.getsid(0)
    if session not in (os.getpid(), os.getsid(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


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
