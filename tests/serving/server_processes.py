"""`rm-opt serve` as a process: started as a user does, or forked with its imports done, and so each of its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnProcess
from pathlib import Path

import torch

from rm_optimizer.interfaces.cli import app
from rm_optimizer.serving.embedded import worker_link
from rm_optimizer.serving.embedded.worker import WorkerOptions
from rm_optimizer.serving.engine import StagedWeights

FORKS: ForkServerContext = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *(
            "pytest",
            "tests.serving.server_processes",
            "rm_optimizer.interfaces.commands.serve",
            "rm_optimizer.serving.http.app",
        ),
        *("rm_optimizer.serving.http.bounded_headers", "rm_optimizer.serving.http.connections"),
        *("rm_optimizer.serving.embedded.engine", "transformers.models.llama.modeling_llama"),
    ]
)


def forked(method: str) -> ForkServerContext:
    """Stands in for `get_context` where a worker is started."""
    assert method == "spawn"
    return FORKS


class StartedServer(subprocess.Popen[bytes]):
    """The command with these arguments in a new interpreter."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-c", "from rm_optimizer.interfaces.cli import app; app()", *arguments]
        super().__init__(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def worker(self) -> int:
        """Process id of the child that holds the model."""
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("the server has no worker")


class ForkedServer(ForkServerProcess):
    """The command in a process whose imports are done, with the methods of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(daemon=False)
        self._arguments = list(arguments)
        self._worker = FORKS.Value("i")
        self.start()

    @property
    def worker(self) -> int:
        """Process id of the newest worker."""
        return int(self._worker.value)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        assert self.exitcode is not None, "the server did not end"

    def run(self) -> None:
        torch.set_num_threads(1)
        forkserver._forkserver.ensure_running = lambda: None  # the one that forked this process forks its workers
        spawned = worker_link._spawned

        def noted(options: WorkerOptions, committed: Sequence[StagedWeights]) -> tuple[Connection, SpawnProcess]:
            connection, process = spawned(options, committed)
            self._worker.value = process.pid or 0
            return connection, process

        worker_link.get_context, worker_link._spawned = forked, noted  # type: ignore[assignment]
        sys.argv = ["rm-opt", *self._arguments]
        app()
