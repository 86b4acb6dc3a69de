"""Locks of the operating system on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from pathlib import Path
from typing import IO, Any

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""
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


def sign(file: IO[str]) -> None:
    """Write the id and host of this process into a file that it has locked, for the messages of other processes."""
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
