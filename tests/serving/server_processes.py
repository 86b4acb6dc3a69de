"""`rm-opt serve` as a process: started as a user does, or forked with its imports done, and so each of its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fork_server import forked_by, forking_python

START = "from rm_optimizer.interfaces.cli import app; app()"


class ServerProcess(subprocess.Popen[bytes]):
    """The command with these arguments.

    Args:
        arguments: words after `rm-opt`.
        is_forked: fork it and its workers; otherwise each begins with its imports.
    """

    def __init__(self, arguments: Sequence[str], *, is_forked: bool) -> None:
        self._is_forked = is_forked and sys.platform == "linux"
        python = forking_python() if is_forked else sys.executable
        super().__init__([str(python), "-c", START, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def worker(self) -> int:
        """Process id of the child that holds the model."""
        server = forked_by(self.pid) if self._is_forked else self.pid
        for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return forked_by(int(child)) if self._is_forked else int(child)
        raise AssertionError("the server has no worker")
