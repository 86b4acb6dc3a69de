"""Two gloo processes take the trajectory of one, evaluate exactly and leave a checkpoint that loads on one device."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from tests.training.launched import (
    TOLERANCE,
    TRAIN,
    assert_same_bytes,
    assert_same_trajectory,
    environment,
    forget_after,
    on_ranks,
    train_on_two_ranks,
)


@pytest.fixture(scope="module")
def two_ranks(small_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on_two_ranks(tmp_path_factory.mktemp("ddp") / "run", small_overrides)


@pytest.mark.slow
def test_two_ranks_follow_the_trajectory_of_one(two_ranks: Path, finished_run: RunResult):
    assert_same_trajectory(Path(finished_run.run_dir), two_ranks)


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
