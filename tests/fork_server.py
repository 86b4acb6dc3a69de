"""Python commands that do not each import torch again: a server has imported it, and forks one process per command.

`starts` makes a folder whose `python` and `rm-opt` take the place of the real ones. They send their arguments, folder,
environment, process group and standard streams to the server, pass on signals, and end with the command's exit code.
Each command is a process of its own, which dies with the `python` or `rm-opt` that asked for it. Lightning reads the
rank of its process when it is imported, so a forked process takes its rank from its own environment.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

MODULES = (
    "hydra.main",
    "hydra._internal.hydra",
    "hydra._internal.core_plugins.basic_launcher",
    "rm_optimizer.interfaces.cli",
    "rm_optimizer.interfaces.command_line",
    "rm_optimizer.training.run",
    "rm_optimizer.reporting.pictures",
    "rm_optimizer.landscape",
    "rm_optimizer.core.storage.loading",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
)
SIZE_BYTES = 8


@contextmanager
def starts(folder: Path) -> Iterator[Path]:
    """Give the path of a `python`, with an `rm-opt` beside it, that the server of this block answers."""
    for name in ("python", "rm-opt"):
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
        yield folder / "python"
        server.communicate()  # which closes its input and so ends it


def ask(real: str) -> None:
    """Have the server run this command; a command that it cannot fork is run by the real Python."""
    name, *arguments = sys.argv
    if Path(name).name == "python":
        if arguments[:1] == ["-u"]:  # torchrun's
            del arguments[0]
        if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-W")):
            os.execv(real, [real, *arguments])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(Path(name).parent / "socket"))
        payload = json.dumps([os.getpgrp(), os.getcwd(), dict(os.environ), name, arguments]).encode()
        socket.send_fds(server, [len(payload).to_bytes(SIZE_BYTES, "big")], [0, 1, 2])
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


def serve(door_number: int, python: str) -> None:
    """Fork a process for every command that is sent, until standard input is closed."""
    import gc
    import importlib
    import multiprocessing

    multiprocessing.set_executable(sys.executable)
    sys.executable = python
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # or each process would visit all of it at its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    door = socket.socket(fileno=door_number)
    while door in select.select([door, sys.stdin], [], [])[0]:
        client, _ = door.accept()
        if os.fork() == 0:
            door.close()
            answer(client)
            return
        client.close()


def answer(client: socket.socket) -> None:
    """Become the command that a client sends, below a process that watches it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, SIZE_BYTES, 3)
    payload = client.makefile("rb").read(int.from_bytes(size, "big"))
    if pid := os.fork():
        watch(client, pid)
        os._exit(0)
    client.close()
    become(streams, *json.loads(payload))


def watch(client: socket.socket, pid: int) -> None:
    """Send the number and the exit code of a process, which ends when the client does."""
    with suppress(BrokenPipeError):
        client.sendall(f"{pid}\n".encode())
        if client in select.select([client, os.pidfd_open(pid)], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        client.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


def become(streams: list[int], group: int, folder: str, variables: dict[str, str], name: str, words: list[str]) -> None:
    """Run a command in this process, as `python` or `rm-opt` starts it."""
    import runpy
    import warnings

    from lightning_fabric.utilities.rank_zero import _get_rank, rank_zero_only

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, group)
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
