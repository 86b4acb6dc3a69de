"""Processes that end with the one that started them, however that ended, so that none keeps memory or port."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, kept over an `exec`; on Linux alone.

    A process that leads no session and has a parent from another was late: its own has ended already. SIGTERM would not
    do: vLLM 0.32 hangs on one that comes while it starts.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    session = os.getsid(0)
    if session not in (os.getpid(), os.getsid(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)
