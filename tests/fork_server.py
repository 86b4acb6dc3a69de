"""Python commands that do not each import torch again: a server has imported it, and forks one process per command.

`forking_python` gives a folder whose `python`, `rm-opt` and `torchrun` take the place of the real ones. They send their
arguments, folder, environment, process group and open files to the server, pass on signals, and end with the command's
exit code. Each command is a process of its own, which dies with the `python` or `rm-opt` that asked for it, and which
`forked_by` finds. What a command spawns by `multiprocessing` is forked so as well. Lightning reads the rank of its
process when it is imported, so a forked process takes its rank from its own environment.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NoReturn

MODULES = (
    "hydra.main",
    "hydra._internal.hydra",
    "hydra._internal.core_plugins.basic_launcher",
    "rm_optimizer.interfaces.cli",
    "rm_optimizer.interfaces.command_line",
    "rm_optimizer.interfaces.commands.serve",
    "rm_optimizer.training.run",
    "rm_optimizer.reporting.run_report",
    "rm_optimizer.landscape",
    "rm_optimizer.core.storage.loading",
    "rm_optimizer.serving.embedded.engine",
    "rm_optimizer.serving.embedded.worker",
    "rm_optimizer.serving.http.app",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.tensorboard",
)
SIZE_BYTES = 8
MAX_FILES = 64
FREE_NUMBERS = 512
"""File numbers from here on are taken by nothing else."""
running = ExitStack()
"""The server of `forking_python`, which ends when this is closed."""


@cache
def forking_python() -> Path:
    """Path of a `python`, with an `rm-opt` and a `torchrun` beside it, on Linux; the real ones elsewhere."""
    if sys.platform != "linux":
        return Path(sys.executable)
    return running.enter_context(starts(Path(running.enter_context(TemporaryDirectory()))))


def forked_by(process: int) -> int:
    """Id of the process that runs what a `python` or `rm-opt` of this module was asked for.

    Raises:
        ProcessLookupError: if there is none.
    """
    if sys.platform != "linux":
        return process
    for name in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if name.read_text() == f"for {process}\n":
                return int(name.parent.name)
    raise ProcessLookupError(f"nothing runs for process {process}")


@contextmanager
def starts(folder: Path) -> Iterator[Path]:
    """Give the path of a `python` that the server of this block answers."""
    for name in ("python", "rm-opt", "torchrun"):
        shim = folder / name
        shim.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}\nask({sys.executable!r})\n")
        shim.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "socket"))
        door.listen(64)
        code = f"from tests.fork_server import serve; serve({door.fileno()}, {str(folder / 'python')!r})"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
            cwd=Path(__file__).parents[1],
            env=environment,
        )
        subprocess.run([folder / "python", "-c", ""], check=True)  # once it has imported all
        yield folder / "python"
        server.communicate()  # which closes its input and so ends it


def ask(real: str) -> None:
    """Have the server run this command; a command that it cannot fork is run by the real Python."""
    name, *arguments = sys.argv
    if Path(name).name == "python":
        while arguments[:1] in (["-u"], ["-B"]):  # torchrun's and multiprocessing's
            del arguments[0]
        if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-W")):
            os.execv(real, [real, *arguments])
    files = open_files()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(Path(name).parent / "socket"))
        command = [files, os.getpid(), os.getpgrp(), os.getcwd(), dict(os.environ), name, arguments]
        payload = json.dumps(command).encode()
        socket.send_fds(server, [len(payload).to_bytes(SIZE_BYTES, "big")], files)
        server.sendall(payload)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def open_files() -> list[int]:
    """Numbers of this process's open files."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # of the list itself
            os.fstat(number)
            found.append(number)
    return found


def serve(door_number: int, python: str) -> None:
    """Fork a process for every command that is sent, until standard input is closed."""
    import gc
    import importlib
    import multiprocessing

    sys.executable = python
    multiprocessing.set_executable(python)
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # or each process would visit all of it at its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    door = socket.socket(fileno=door_number)
    while door in select.select([door, sys.stdin], [], [])[0]:
        client, _ = door.accept()
        if os.fork() == 0:
            door.close()
            ending_at_once(answer, client)
        client.close()


def ending_at_once(function: Callable[..., None], *arguments: object) -> NoReturn:
    """End this process with a function, as an interpreter does but without taking every module apart."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # a closed one
                stream.flush()
        os._exit(code)


def answer(client: socket.socket) -> None:
    """Become the command that a client sends, below a process that watches it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(client, SIZE_BYTES, MAX_FILES)
    payload = client.makefile("rb").read(int.from_bytes(size, "big"))
    if pid := os.fork():
        for file in files:
            os.close(file)
        watch(client, pid)
        os._exit(0)
    client.close()
    numbers, *command = json.loads(payload)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE_NUMBERS) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    become(*command)


def watch(client: socket.socket, pid: int) -> None:
    """Send the number and the exit code of a process, which ends when the client does."""
    with suppress(BrokenPipeError):
        client.sendall(f"{pid}\n".encode())
        if client in select.select([client, os.pidfd_open(pid)], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        client.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


def become(asker: int, group: int, folder: str, variables: dict[str, str], name: str, words: list[str]) -> None:
    """Run a command in this process, as `python`, `rm-opt` or `torchrun` starts it."""
    import runpy
    import warnings

    from lightning_fabric.utilities.rank_zero import _get_rank, rank_zero_only

    Path("/proc/self/comm").write_text(f"for {asker}")
    try:
        os.setpgid(0, group)
    except PermissionError:  # the group is of another session, which torchrun began
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    rank_zero_only.rank = _get_rank() or 0
    if words[:1] == ["-W"]:
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    if Path(name).name == "rm-opt":
        from rm_optimizer.interfaces.cli import app

        sys.argv = [name, *words]
        app()
    elif Path(name).name == "torchrun":
        from torch.distributed.run import main

        main(words)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] != "-c":
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
