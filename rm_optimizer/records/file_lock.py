"""Locks of the operating system on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.files import remove_left

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""
_HELD: set[tuple[Path, int]] = set()
log = logging.getLogger("rm_optimizer")


def locked(file: IO[Any] | int) -> bool:
    """Lock an open file or folder until it is closed or the process ends; False if another process has it.

    Raises:
        OSError: if the file system has no locks.
    """
    if sys.platform == "win32":  # no advisory locks there
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locked_if_possible(file: IO[Any] | int, folder: Path, work: str) -> bool:
    """Lock as `locked` does; if the file system has no locks, warn and return True.

    Args:
        file: an open file or folder.
        folder: folder that the lock protects.
        work: work that one process at a time does in the folder, for the warning.
    """
    try:
        return locked(file)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        text = "the file system of %s has no locks (%s); do not start a second %s in this folder"
        log.warning(text, folder, error.strerror, work)
        return True


@contextmanager
def held(folder: Path, work: str) -> Iterator[None]:
    """Hold a folder of results for this process; a folder made for it is removed if nothing was written.

    The folder itself is locked, so no file is left behind. A block inside, on the same thread, shares the lock.
    If the file system has no locks, it logs a warning and continues without one.

    Args:
        folder: the folder, made if missing.
        work: work that one process at a time does there, for the messages.

    Raises:
        ConfigError: if another process holds it.
    """
    is_new, place = not folder.exists(), (folder.resolve(), threading.get_ident())
    if place in _HELD:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not locked_if_possible(descriptor, folder, work):
            raise ConfigError(
                f"{folder} is in use: another process writes an {work} there; wait for it, stop it, or choose "
                "another output folder"
            )
        _HELD.add(place)
        remove_left(folder)
        yield
    finally:
        _HELD.discard(place)
        if is_new:
            with suppress(OSError):  # it holds results
                folder.rmdir()
        os.close(descriptor)


def sign(file: IO[str]) -> None:
    """Write the id and host of this process into a file that it has locked, for the messages of other processes."""
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
