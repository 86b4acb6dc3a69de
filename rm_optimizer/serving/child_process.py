"""Child processes: their end with the parent, their restarts, and a limit on these."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

from rm_optimizer.errors import RMOptimizerError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, also after an `exec`; Linux only.

    A process that leads no session and whose parent is in another one has lost its parent already.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    session = os.getsid(0)
    if session not in (os.getpid(), os.getsid(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


def resident_bytes(process: int) -> int:
    """Memory of a process in bytes; 0 if it has ended, or where the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


MOST_RESTARTS = 5
"""Most restarts within `WINDOW_SECONDS`."""
MOST_FLEET_RESTARTS = 50
"""Most restarts of a process that others do not wait for, since they serve meanwhile."""
WINDOW_SECONDS = 900.0


class RestartLimit:
    """Counter of one process's restarts.

    Args:
        what: name of the process, for the message.
        most: most restarts within `WINDOW_SECONDS`.
    """

    def __init__(self, what: str, most: int = MOST_RESTARTS) -> None:
        self._what, self._most = what, most
        self._times: deque[float] = deque(maxlen=most)

    def note(self) -> None:
        """Record a restart that is about to happen.

        Raises:
            RMOptimizerError: if it is one too many.
        """
        now = time.monotonic()
        if len(self._times) == self._most and now - self._times[0] < WINDOW_SECONDS:
            raise RMOptimizerError(f"{self._what} ended {self._most + 1} times within {now - self._times[0]:.0f} s")
        self._times.append(now)


def keep_running(what: str) -> None:
    """Continue in a child process, which the calling process replaces whenever a signal kills it.

    This function returns in each child. The calling process passes SIGTERM and SIGINT on to the child and ends with it.

    Args:
        what: name of the child, for messages.

    Raises:
        SystemExit: in the calling process, with the exit code of a child that ended by itself.
        RMOptimizerError: in the calling process, if a child is killed too often.
    """
    passed_on, restarts = {signal.SIGTERM, signal.SIGINT}, RestartLimit(what, MOST_FLEET_RESTARTS)
    child, is_stopping = 0, False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True
        os.kill(child, number)

    earlier = {number: signal.getsignal(number) for number in passed_on}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    while True:
        sys.stdout.flush()
        child = os.fork()
        for number in passed_on:
            signal.signal(number, earlier[number] if child == 0 else stop)
        if child == 0:
            os.setsid()  # Ctrl-C reaches the parent alone
            end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        if child == 0:
            return
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # the child's number stays valid for `stop`
        signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or is_stopping:
            raise SystemExit(code if code >= 0 else 128 - code)
        restarts.note()
        print(f"rm-opt serve: {what} was killed by signal {-code}; starting another", file=sys.stderr, flush=True)
