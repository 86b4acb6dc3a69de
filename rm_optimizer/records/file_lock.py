"""Locks of the operating system on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import IO, Any

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""


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


def sign(file: IO[str]) -> None:
    """Write the id and host of this process into a file that it has locked, for the messages of other processes."""
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
