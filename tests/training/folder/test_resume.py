"""A killed run continues to the bytes of the run that was never killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult
from rm_optimizer.training.run import run_training

Build = Callable[..., TrainConfig]
OUTCOMES = ("metrics.csv", "best/model.safetensors")


def assert_same_outcome(left: Path, right: Path) -> None:
    for name in OUTCOMES:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def stopped_after(step: int, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Run until just after the checkpoint of `step`, then die without any clean-up of ours."""
    from rm_optimizer.training.callbacks import checkpoints

    def dies(run_dir: Path, keep: int) -> None:
        newest = sorted((run_dir / "checkpoints").glob("step-*.ckpt"))[-1]
        if int(newest.stem.removeprefix("step-")) >= step:
            raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "prune", dies)
        with pytest.raises(MemoryError):
            run_training(config, **given)


@pytest.fixture(
    scope="module",
    params=[
        [],
        ["optimizer=muon"],
        ["optimizer=schedulefree", "schedule=constant", "training.eval_at_start=false"],
        ["model.dropout=true", "+model.architecture.attention_dropout=0.1"],
        ["adapter=lora_r8", "adapter.dropout=0.1"],
    ],
    ids=["adamw", "muon", "schedulefree", "dropout", "lora"],
)
def whole(
    request: pytest.FixtureRequest, small_config: Build, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Folder of a run that was never killed, and its options."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    common = ["training.checkpoint_every=1", "training.epochs=1.5", "batching.micro_token_budget=400"]
    options = [*request.param, *common]
    run_training(small_config(folder, *options))
    return folder, options


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_bitwise_equal(
    small_config: Build, whole: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    folder, options = whole
    stopped_after(step, small_config(tmp_path, *options), monkeypatch)
    run_training(small_config(tmp_path, *options, "resume=auto"))
    assert_same_outcome(folder, tmp_path)


def test_a_torn_checkpoint_is_skipped_for_the_one_before(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    common = ["training.checkpoint_every=1"]
    run_training(small_config(tmp_path / "whole", *common))
    stopped_after(4, small_config(tmp_path / "cut", *common), monkeypatch)
    newest = tmp_path / "cut" / "checkpoints" / "step-00000004.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    run_training(small_config(tmp_path / "cut", *common, "resume=auto"))
    assert "skipping the damaged checkpoint" in caplog.text
    assert_same_outcome(tmp_path / "whole", tmp_path / "cut")


def test_other_options_are_refused_by_name(finished_run: RunResult, small_config: Build, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(finished_run.run_dir, folder)
    with pytest.raises(ConfigError, match=r"loss\.beta was 1\.0, is 2\.0.*hydra\.run\.dir"):
        run_training(small_config(folder, "loss.beta=2", "resume=auto"))


def test_resume_without_a_checkpoint_starts(finished_run: RunResult, small_config: Build, tmp_path: Path):
    run_training(small_config(tmp_path, "resume=auto"))
    assert_same_outcome(Path(finished_run.run_dir), tmp_path)


@pytest.mark.slow
def test_kill_minus_nine_loses_nothing(python: Path, small_overrides: list[str], small_config: Build, tmp_path: Path):
    options = [*small_overrides, "training.max_steps=40", "training.checkpoint_every=3", "resume=auto"]
    command = [python, "-m", "rm_optimizer.train", *options, f"hydra.run.dir={tmp_path}/cut"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill_at in (4, 17):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        path = tmp_path / "cut" / "checkpoints"
        while process.poll() is None and not any(int(p.stem[5:]) >= kill_at for p in path.glob("step-*.ckpt")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    run_training(small_config(tmp_path / "whole", "training.max_steps=40", "training.checkpoint_every=3"))
    assert_same_outcome(tmp_path / "whole", tmp_path / "cut")
