"""Two gloo processes take the trajectory of one, evaluate exactly and leave a checkpoint that loads on one device."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from tests.training.launched import (
    ON_CPU,
    TOLERANCE,
    TRAIN,
    assert_same_bytes,
    assert_same_trajectory,
    environment,
    forget_after,
    on_ranks,
    run_to_its_end,
    train_on_two_ranks,
)


@pytest.fixture(scope="module")
def two_ranks(small_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on_two_ranks(tmp_path_factory.mktemp("ddp") / "run", small_overrides)


@pytest.mark.slow
def test_two_ranks_follow_the_trajectory_of_one(two_ranks: Path, finished_run: RunResult):
    assert_same_trajectory(Path(finished_run.run_dir), two_ranks)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words, size = [word for word in sys.argv[1:] if not word.startswith("--")], int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {{"SLURM_NTASKS": size, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": size, "SLURM_NODEID": 0}}
tasks = [step | {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank}} for rank in range(size)]
started = [subprocess.Popen(words, env=os.environ | {{k: str(v) for k, v in task.items()}}) for task in tasks]
sys.exit(max(each.wait() for each in started))
"""
"""The part of `srun` that a training sees: tasks on one machine that know their numbers."""


@pytest.mark.slow
def test_four_tasks_of_slurm_follow_the_trajectory_of_one(
    python: Path, small_overrides: list[str], finished_run: RunResult, tmp_path: Path
):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    job = {"SLURM_JOB_ID": "6204", "SLURM_JOB_NAME": "rm-train", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1"}
    path = f"{tmp_path}{os.pathsep}{python.parent}{os.pathsep}{os.environ['PATH']}"
    own = [each for each in small_overrides if not each.startswith(("hardware", "resume", "training.progress"))]
    run_to_its_end(
        ["bash", str(EXAMPLES / "train_slurm.sh"), *own, *ON_CPU],
        cwd=tmp_path, PATH=path, RUN="run", SLURM_NTASKS_PER_NODE="4", **job,
    )  # fmt: skip
    assert_same_trajectory(Path(finished_run.run_dir), tmp_path / "run")


@pytest.mark.slow
def test_a_rank_without_pairs_takes_part(
    python: Path, small_overrides: list[str], small_config: Callable[..., TrainConfig], tmp_path: Path
):
    overrides = ["batching.batch_size=95", "training.epochs=2"]  # every second step is one pair
    train_reward_model(small_config(tmp_path / "one", *overrides))
    two = train_on_two_ranks(tmp_path / "two", [*small_overrides, *overrides], python=python)
    assert_same_trajectory(tmp_path / "one", two)


@pytest.mark.slow
def test_two_ranks_evaluate_every_pair_once(two_ranks: Path, finished_run: RunResult):
    result = RunResult.from_json((two_ranks / "run.json").read_text())
    assert result.metrics.num_pairs == finished_run.metrics.num_pairs == 33
    lines = (two_ranks / "pair_rewards.jsonl").read_text().splitlines()
    before = (Path(finished_run.run_dir) / "pair_rewards.jsonl").read_text().splitlines()
    assert [json.loads(line)["pair_id"] for line in lines] == [json.loads(line)["pair_id"] for line in before]
    for left, right in zip(lines, before, strict=True):
        assert json.loads(left)["chosen"] == pytest.approx(json.loads(right)["chosen"], abs=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_loads_on_one_device(two_ranks: Path):
    newest = sorted((two_ranks / "checkpoints").glob("step-*.ckpt"))[-1]
    reward = BradleyTerryRM.from_pretrained(newest).score(["Hi"], ["Hello"])
    best = BradleyTerryRM.from_pretrained(two_ranks / "best").score(["Hi"], ["Hello"])
    assert float(reward) == pytest.approx(float(best), abs=1.0)


@pytest.mark.slow
def test_killed_ranks_resume_to_the_same_bytes(
    python: Path, two_ranks: Path, small_overrides: list[str], tmp_path: Path
):
    shutil.copytree(two_ranks, tmp_path / "cut")
    forget_after(3, tmp_path / "cut")
    train_on_two_ranks(tmp_path / "cut", [*small_overrides, "resume=auto"], python=python)
    assert_same_bytes(two_ranks, tmp_path / "cut")


@pytest.mark.slow
def test_tasks_of_slurm_stop_together_when_one_is_told_to(python: Path, small_overrides: list[str], tmp_path: Path):
    """As `srun` starts them; both save one checkpoint, in the one folder that a requeued job finds again."""
    command = [*on_ranks(small_overrides), "training.max_steps=9999", "training.checkpoint_every=9999"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = partial(subprocess.Popen, [python, *TRAIN, *command], cwd=tmp_path, stderr=subprocess.PIPE)
    tasks = [start(env=slurm_task(rank, port), stdout=subprocess.DEVNULL, text=True) for rank in (0, 1)]
    folder = tmp_path / "outputs" / "train" / "slurm-4242.0"
    while not (folder / "checkpoints" / "best.ckpt").exists() and all(task.poll() is None for task in tasks):
        time.sleep(0.05)
    tasks[1].send_signal(signal.SIGTERM)
    messages = [task.communicate(timeout=200)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [130, 130], messages
    assert "stopped after step" in messages[0]
    assert len(list(folder.glob("checkpoints/step-*.ckpt"))) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["slurm-4242.0"]


def slurm_task(rank: int, port: int) -> dict[str, str]:
    shared = {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost"}
    sizes = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    return environment(**shared, **sizes, **own, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
