"""Resident memory of this process, and its peak within an interval."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

INTERVAL = 0.005
"""Seconds between samples; a peak that lasts less may be missed."""

_STATM = Path("/proc/self/statm")
_RESIDENT = 1  # the second field of statm, in pages (proc(5))


def rss_source() -> str:
    """Source of the numbers on this system, in words."""
    if _STATM.exists():
        return f"resident set of the training process, sampled every {1000 * INTERVAL:g} ms by a thread"
    return "highest resident set of the training process since its start (getrusage)"


def rss_bytes() -> int:
    """Resident memory of this process; on a system without `/proc`, the peak since its start."""
    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE")
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024  # kilobytes but on macOS (getrusage(2))


class RssSampler:
    """Thread that records the peak of the resident memory; the data loader's processes are not counted."""

    def __init__(self) -> None:
        self._peak = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rss-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self.restart_peak()
        self._thread.start()

    def restart_peak(self) -> None:
        """Reset the peak to the present resident memory."""
        with self._lock:  # a sample taken before may not be written after
            self._peak = rss_bytes()

    def peak_bytes(self) -> int:
        """The peak since the last restart, the present value included."""
        with self._lock:
            self._peak = max(self._peak, rss_bytes())
            return self._peak

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak_bytes()
