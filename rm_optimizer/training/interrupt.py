"""Ctrl-C and SIGTERM end a run after the step under way, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("rm_optimizer")


class StopSignal:
    """Context in which the first SIGINT or SIGTERM only sets `requested`.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self.arm()
        return self

    def arm(self) -> None:
        """Take the signals over, again if a library has put its own handlers in between."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning("stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once")
