"""Ctrl-C ends a run after the step under way and leaves a checkpoint that loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.training.interrupt import StopSignal


def wait_for_rows(path: Path, rows: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") > rows:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {rows} rows in {path}: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_says_where(small_overrides: list[str], tmp_path: Path, number: int) -> None:
    options = [
        *small_overrides,
        "training.max_steps=100000",
        "training.checkpoint_every=2",
        f"hydra.run.dir={tmp_path}/run",
    ]
    command = [sys.executable, "-m", "rm_optimizer.train", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    wait_for_rows(tmp_path / "run" / "metrics.csv", 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "stopped after step" in errors
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*.ckpt"))[-1]
    assert newest.name in errors.replace("\n", "")
    assert torch.isfinite(BradleyTerryRM.from_pretrained(newest).score(["Hi"], ["Hello"])).all()


def test_the_second_signal_stops_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
