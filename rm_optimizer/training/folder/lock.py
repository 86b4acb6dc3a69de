"""Lock of the operating system on a run folder, for one process at a time; it ends with the process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.files import UNSUPPORTED, locked_if_possible, remove_left, sign, writing

LOCK_FILE = ".lock"
"""File in the run folder; it stays there, and only a living process holds its lock."""
_RESERVED: set[Path] = set()


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this process; the first of a distributed run holds it for all.

    If the file system has no locks, it logs a warning and continues without one.

    Args:
        run_dir: the run folder, which exists.

    Raises:
        ConfigError: if another process holds it; the text names that process.
        DiskError: if the folder cannot be written.
    """
    if run_dir.resolve() in _RESERVED:
        _RESERVED.remove(run_dir.resolve())
        yield
        return
    path = run_dir / LOCK_FILE
    with writing(path):
        file = path.open("a+", encoding="utf-8")
    with file:
        _lock(file, run_dir)
        sign(file)
        remove_left(run_dir)
        try:
            yield
        finally:
            _release(file)


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Hold a run folder, created if missing, until the following `run_lock` of this process takes over its lock.

    Args:
        run_dir: the run folder.

    Raises:
        ConfigError: if another process holds it; the text names that process.
        DiskError: if the folder cannot be written.
    """
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir):
        _RESERVED.add(run_dir.resolve())
        try:
            yield
        finally:
            _RESERVED.discard(run_dir.resolve())


def require_free(run_dir: Path) -> None:
    """Refuse a run folder that another process works in, without writing anything.

    Raises:
        ConfigError: naming that process.
    """
    path = run_dir / LOCK_FILE
    try:
        file = path.open("r+", encoding="utf-8")
    except OSError:
        return
    with file:
        _lock(file, run_dir)
        _release(file)


def _lock(file: TextIO, run_dir: Path) -> None:
    if not locked_if_possible(file, run_dir, "run"):
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise ConfigError(
            f"{run_dir} is in use: {holder} trains in it; wait for it, stop it, or choose another hydra.run.dir"
        )


def _release(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
