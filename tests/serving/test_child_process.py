"""How long an engine's process is restarted, and that it ends with its server."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.serving import child_process

CHILD = (
    "import time; from rm_optimizer.serving.child_process import end_with_parent; end_with_parent(); "
    "print('up', flush=True); time.sleep(60)"
)
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"


def test_a_process_that_crashes_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch):
    now = [1e5]
    monkeypatch.setattr(child_process.time, "monotonic", lambda: now[0])
    limit = child_process.RestartLimit("the engine")
    for _ in range(7):  # never six within a window
        limit.note()
        now[0] += child_process.WINDOW_SECONDS / 5
    now[0] -= 20.0
    with pytest.raises(RMOptimizerError, match="the engine ended 6 times within 880 s"):
        limit.note()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the end of a parent is Linux's")
def test_a_child_ends_with_its_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        started = time.monotonic()
        assert parent.stdout.read() == b""  # the end of the pipe: the child, which shares it, is gone too
    assert time.monotonic() - started < 30
