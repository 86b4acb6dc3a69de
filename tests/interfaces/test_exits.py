"""Every command ends with a sentence and a documented exit code, whatever the system does to it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rm_optimizer.errors import ConfigError, DataError, DiskError
from rm_optimizer.interfaces.exits import CLOSED_OUTPUT, one_exit
from rm_optimizer.records.files import disk_error, replacing, write_text
from rm_optimizer.records.ledger import open_ledger

ENTRY = "from rm_optimizer.interfaces.cli import app; app()"


def rm_opt(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'rm-opt'; {ENTRY}", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def leaves(error: BaseException) -> object:
    with pytest.raises(SystemExit) as stopped, one_exit():
        raise error
    return stopped.value.code


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("seed must not be negative"), 2, "error: seed must not be negative\n"),
        (DataError("pairs.jsonl: no such file"), 2, "error: pairs.jsonl: no such file\n"),
        (KeyboardInterrupt(), 130, "error: stopped\n"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/metrics.json"),
            5,
            "error: runs/a/metrics.json cannot be written (No space left on device); free space in runs/a\n",
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), "runs/x"),
            5,
            "error: runs/x cannot be written (Read-only file system); make the file system writable in runs\n",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            5,
            "error: a file cannot be written (No space left on device); free space\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_that_a_user_can_mend_is_one_sentence(error, code, sentence, capfd):
    assert leaves(error) == code
    assert capfd.readouterr().err == sentence


BUGS = [
    *(ZeroDivisionError(), OSError(errno.ENOENT, "no such file", "gone"), BrokenPipeError()),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_rises_as_it_is_and_writes_nothing(bug, capfd):
    with pytest.raises(type(bug)) as caught, one_exit():
        raise bug
    assert caught.value is bug
    assert capfd.readouterr().out == ""


def test_another_exit_code_is_kept():
    assert leaves(SystemExit(4)) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["score", "--help"], ["--version"]])
def test_a_full_standard_output_is_said_and_exits_5(arguments):
    with Path("/dev/full").open("w") as full:
        done = rm_opt(*arguments, stdout=full)
    assert done.returncode == DiskError.exit_code
    assert done.stderr == "error: standard output cannot be written (No space left on device)\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_closed_standard_output_is_said_and_exits_141(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = rm_opt(*arguments, stdout=writing)
    os.close(writing)
    assert done.returncode == CLOSED_OUTPUT
    assert done.stderr == "error: standard output was closed before all of it was written\n"


def test_a_table_on_a_closed_standard_output_is_the_same_failure():
    code = "from rm_optimizer.interfaces.exits import one_exit; from rich.console import Console\n"
    code += "with one_exit():\n    Console().print('x' * 100)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr.count("\n")) == (CLOSED_OUTPUT, 1)


def test_a_terminal_without_unicode_gets_question_marks():
    code = "from rm_optimizer.interfaces.exits import one_exit\nwith one_exit():\n    print('a \\u2022 b')"
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ascii_only, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a ? b\n", "")


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    target, link = tmp_path / "real" / "audit.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_dangling_link_gets_its_file(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "later.json")
    write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "later.json").read_text() == "new"


@pytest.mark.parametrize("device", ["/dev/null", "/dev/stdout", "/dev/fd/1"])
def test_a_device_is_written_through(device):
    with replacing(Path(device)) as written:
        assert written == Path(device)


def test_a_refused_write_names_its_file(tmp_path):
    with pytest.raises(OSError, match="/dev/full"):
        write_text(Path("/dev/full"), "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def append_beyond_the_limit() -> None:
        with open_ledger(tmp_path / "a.partial", "id", other="x") as log:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
            log.append(["a reward"] * 64)

    try:
        with pytest.raises(OSError, match=r"a\.partial") as caught:
            append_beyond_the_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(disk_error(caught.value)).startswith(f"{tmp_path}/a.partial cannot be written (File too large)")


def test_a_pipe_is_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True)
    write_text(tmp_path / "pipe", "through")
    assert reader.communicate(timeout=10)[0] == "through"
    assert (tmp_path / "pipe").is_fifo()
