"""A disk that refuses ends the run with one sentence, and what stood before stands still."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.errors import DiskError
from rm_optimizer.records.files import writing
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.callbacks import evaluation as callbacks
from rm_optimizer.training.loggers import MetricsCSV

Build = Callable[..., TrainConfig]


def refused(number: int, *filename: str) -> OSError:
    return OSError(number, os.strerror(number), *filename)


def write_and_fail(path: Path, error: Exception, first_in: Path | None = None) -> None:
    with writing(path, first_in=first_in):
        raise error


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space in"),
        (errno.EDQUOT, "raise your quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "make the file system writable"),
        (errno.EACCES, "permission to write"),
    ],
)
def test_each_refusal_has_a_sentence_with_path_reason_and_remedy(number: int, remedy: str):
    with pytest.raises(DiskError) as caught:
        write_and_fail(Path("/runs/a/metrics.csv"), refused(number))
    sentence = str(caught.value)
    assert sentence.startswith(f"/runs/a/metrics.csv cannot be written ({os.strerror(number)}); ")
    assert remedy in sentence
    assert "\n" not in sentence


def test_safetensors_says_it_in_its_own_words():
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(DiskError, match=r"/runs/best cannot be written .*free space in /runs"):
        write_and_fail(Path("/runs/best"), error)


def test_the_folder_of_temporary_files_is_named_where_it_may_be_the_full_one():
    with pytest.raises(DiskError, match=r"free space in /runs or /spool, where it is written first"):
        write_and_fail(Path("/runs/a.ckpt"), refused(errno.ENOSPC), first_in=Path("/spool"))


@pytest.mark.parametrize(
    "error",
    [
        refused(errno.ENOENT, "/runs/a/b"),
        refused(errno.EACCES, "/data/pairs.jsonl"),
        SafetensorError("header too large"),
        ValueError("no"),
    ],
)
def test_what_is_not_the_disk_s_doing_rises_as_it_is(error: Exception):
    with pytest.raises(type(error)) as caught:
        write_and_fail(Path("/runs/a"), error)
    assert caught.value is error


def test_a_full_disk_under_metrics_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise refused(errno.ENOSPC)

    recorder = MetricsCSV(tmp_path)
    recorder.log_metrics({"train/loss": 1.0}, step=1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"metrics\.csv cannot be written \(No space left on device\); free space in"):
        recorder.save()
    monkeypatch.undo()
    recorder.finalize("failed")


@pytest.mark.parametrize("writer", ["save_checkpoint", "write_evaluation"])
def test_a_full_disk_ends_training_at_whichever_write(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
):
    def full(*args: object, **kwargs: object) -> None:
        raise refused(errno.ENOSPC)

    monkeypatch.setattr(callbacks, writer, full)
    with pytest.raises(DiskError, match=f"{tmp_path}.* cannot be written .No space left on device"):
        train_reward_model(small_config(tmp_path))


def test_a_real_refusal_leaves_one_sentence_and_whole_checkpoints(
    python: Path, finished_run: RunResult, small_overrides: list[str], tmp_path: Path
):
    shutil.copytree(finished_run.run_dir, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    max(checkpoints.glob("step-*.ckpt")).unlink()
    (tmp_path / "run" / "run.json").unlink()
    before = {path: path.read_bytes() for path in checkpoints.glob("step-*.ckpt")}
    largest = max(before).stat().st_size // 2
    limited = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest})); "
        "runpy.run_module('rm_optimizer.train', run_name='__main__', alter_sys=True)"
    )
    ended = subprocess.run(
        [python, "-c", limited, *small_overrides, f"hydra.run.dir={tmp_path}/run", "resume=auto"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == DiskError.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    [sentence] = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert f"{tmp_path}/run" in sentence
    assert "File too large" in sentence
    assert "ulimit -f" in sentence
    assert {path: path.read_bytes() for path in before} == before
    assert BradleyTerryRM.from_pretrained(min(before)).score(["a"], ["b"]).shape == (1,)
