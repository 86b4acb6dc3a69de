"""A disk that is full, read-only or forbidden ends a run with one sentence instead of a traceback."""

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
"""What to do about each of the system's refusals that are the disk's; others are bugs and rise."""


@contextmanager
def writing(path: Path, *, first_in: Path | None = None) -> Iterator[None]:
    """Turn the system's refusal to write into one sentence that names the path.

    Args:
        path: what is being written; named where the system does not say which file it refused.
        first_in: folder where it is written before it is moved, if that is elsewhere.

    Raises:
        DiskError: if the disk is full or read-only, or permission is missing.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (number := _error_number(error)) not in REMEDIES or _is_elsewhere(number, error, path):
            raise
        raise DiskError(_sentence(path, error, REMEDIES[number], first_in)) from error


def _error_number(error: OSError | SafetensorError) -> int:
    """The system's error number; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else 0


def _is_elsewhere(number: int, error: OSError | SafetensorError, path: Path) -> bool:
    """Whether permission is missing for a file that is not beside or below what is written, and perhaps only read."""
    named = getattr(error, "filename", None)
    beside = not isinstance(named, str) or Path(named).is_relative_to(path.parent)
    return number in (errno.EACCES, errno.EPERM) and not beside


def _sentence(path: Path, error: OSError | SafetensorError, remedy: str, first_in: Path | None) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    refused = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else path
    where = f"{path} cannot be written" + (f" ({refused}: {reason})" if refused != path else f" ({reason})")
    folders = f"{path.parent} or {first_in}, where it is written first," if first_in else f"{path.parent}"
    return f"{where}; {remedy} in {folders} and go on with resume=auto in the same run folder"
