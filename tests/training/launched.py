"""Training runs of several processes, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rm_optimizer.records.run_folder import read_rows

TRAIN = ["-m", "rm_optimizer.train"]
ON_CPU = ["hardware.accelerator=cpu", "hardware.num_threads=1"]
# float32 sums in another order, through six steps of AdamW
TOLERANCE = 2e-4


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def run_to_its_end(command: Sequence[str], cwd: Path | None = None, **variables: str) -> None:
    done = subprocess.run(
        command, env=environment(**variables), cwd=cwd, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def on_ranks(overrides: Sequence[str], hardware: str = "ddp") -> list[str]:
    """The overrides, the last of each option, with hardware of several processes in place of their own."""
    last = {line.partition("=")[0]: line for line in [*overrides, f"hardware={hardware}", *ON_CPU]}
    return list(last.values())


def train_on_two_ranks(
    folder: Path, overrides: Sequence[str], hardware: str = "ddp", python: str | Path = sys.executable
) -> Path:
    run_to_its_end([str(python), *TRAIN, *on_ranks(overrides, hardware), f"hydra.run.dir={folder}"])
    return folder


def forget_after(step: int, run_dir: Path) -> None:
    """Leave a finished run's folder as a kill just after the checkpoint of `step` leaves it."""
    for path in run_dir.glob("checkpoints/step-*.ckpt"):
        if int(path.stem[5:]) > step:
            path.unlink()
    (run_dir / "run.json").unlink()


def assert_same_trajectory(one: Path, two: Path) -> None:
    before, after = read_rows(one / "metrics.csv"), read_rows(two / "metrics.csv")
    assert [row["step"] for row in before] == [row["step"] for row in after]
    for column in ("train_loss", "grad_norm", "eval_loss", "eval_margin"):
        for left, right in zip(before, after, strict=True):
            if left[column]:
                assert float(right[column]) == pytest.approx(float(left[column]), abs=TOLERANCE), column


def assert_same_bytes(one: Path, two: Path) -> None:
    for name in ("metrics.csv", "best/model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
