"""`rm-opt serve` as a process that is forked with its imports done, and so is each of its workers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.fork_server import forked_by, forking_python

START = "from rm_optimizer.interfaces.cli import app; app()"


class ServerProcess(subprocess.Popen[bytes]):
    """The command with these arguments, the words after `rm-opt`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [str(forking_python()), "-c", START, *arguments]
        super().__init__(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def worker(self) -> int:
        """Process id of the child that holds the model."""
        server = forked_by(self.pid)
        for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return forked_by(int(child))
        raise AssertionError("the server has no worker")
