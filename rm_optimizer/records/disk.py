"""One sentence instead of a traceback for a disk that is full, read-only or forbidden."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rm_optimizer.errors import DiskError

REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or raise your quota,",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "give yourself permission to write",
    errno.EPERM: "give yourself permission to write",
}
"""Remedy for each error number that means a fault of the disk; other errors are bugs and are raised as they are."""


@contextmanager
def writing(path: Path, *, first_in: Path | None = None) -> Iterator[None]:
    """Turn an error of the system while writing into one sentence that names the path.

    Args:
        path: written path, which the sentence names.
        first_in: other folder where the file is written before it is moved to `path`, if there is one.

    Raises:
        DiskError: if the disk is full or read-only, or permission is missing.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _is_elsewhere(error, path) or (found := disk_error(error, path, first_in)) is None:
            raise
        raise DiskError(f"{found} and go on with resume=auto in the same run folder") from error


def disk_error(error: Exception, path: Path | None = None, first_in: Path | None = None) -> DiskError | None:
    """The sentence for an error of the system while writing; None for any other error.

    Args:
        error: raised error.
        path: written path, which the sentence names; None means the file that the system reports.
        first_in: other folder where the file is written before it is moved to `path`, if there is one.
    """
    if not isinstance(error, OSError | SafetensorError) or (number := _error_number(error)) not in REMEDIES:
        return None
    named = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    written = path or named
    if written is None:
        return DiskError(f"a file cannot be written ({reason}); {REMEDIES[number]}")
    return DiskError(_sentence(written, named, reason, REMEDIES[number], first_in))


def _error_number(error: OSError | SafetensorError) -> int:
    """The system's error number, which errors of safetensors contain only in their text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else 0


def _is_elsewhere(error: OSError | SafetensorError, path: Path) -> bool:
    """True if permission is missing for a file outside the written folder, which was perhaps only read."""
    named = getattr(error, "filename", None)
    beside = not isinstance(named, str) or Path(named).is_relative_to(path.parent)
    return _error_number(error) in (errno.EACCES, errno.EPERM) and not beside


def _sentence(path: Path, named: Path | None, reason: object, remedy: str, first_in: Path | None) -> str:
    where = f"{path} cannot be written" + (f" ({named}: {reason})" if named not in (None, path) else f" ({reason})")
    folders = f"{path.parent} or {first_in}, where it is written first," if first_in else f"{path.parent}"
    return f"{where}; {remedy} in {folders}"
