"""Two gloo processes take the trajectory of one, evaluate exactly and leave a checkpoint that loads on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.recorder import read_rows

# float32 sums in another order, through six steps of AdamW
TOLERANCE = 2e-4


def train_on_two_ranks(folder: Path, overrides: list[str]) -> Path:
    ranks = ["hardware=ddp", "hardware.accelerator=cpu", "hardware.num_threads=1", f"hydra.run.dir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "rm_optimizer.train", *overrides, *ranks],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def assert_same_trajectory(one: Path, two: Path) -> None:
    before, after = read_rows(one / "metrics.csv"), read_rows(two / "metrics.csv")
    assert [row["step"] for row in before] == [row["step"] for row in after]
    for column in ("train_loss", "grad_norm", "eval_loss", "eval_margin"):
        for left, right in zip(before, after, strict=True):
            if left[column]:
                assert float(right[column]) == pytest.approx(float(left[column]), abs=TOLERANCE), column


@pytest.fixture(scope="module")
def two_ranks(small_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on_two_ranks(tmp_path_factory.mktemp("ddp") / "run", small_overrides)


@pytest.mark.slow
def test_two_ranks_follow_the_trajectory_of_one(two_ranks: Path, finished_run: RunResult) -> None:
    assert_same_trajectory(Path(finished_run.run_dir), two_ranks)


@pytest.mark.slow
def test_a_rank_without_pairs_takes_part(
    small_overrides: list[str], small_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    overrides = ["batching.batch_size=95", "training.epochs=2"]  # every second step is one pair
    train_reward_model(small_config(tmp_path / "one", *overrides))
    assert_same_trajectory(tmp_path / "one", train_on_two_ranks(tmp_path / "two", [*small_overrides, *overrides]))


@pytest.mark.slow
def test_two_ranks_evaluate_every_pair_once(two_ranks: Path, finished_run: RunResult) -> None:
    result = RunResult.from_json((two_ranks / "run.json").read_text())
    assert result.metrics.num_pairs == finished_run.metrics.num_pairs == 33
    lines = (two_ranks / "pair_rewards.jsonl").read_text().splitlines()
    before = (Path(finished_run.run_dir) / "pair_rewards.jsonl").read_text().splitlines()
    assert [json.loads(line)["pair_id"] for line in lines] == [json.loads(line)["pair_id"] for line in before]
    for left, right in zip(lines, before, strict=True):
        assert json.loads(left)["chosen"] == pytest.approx(json.loads(right)["chosen"], abs=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_loads_on_one_device(two_ranks: Path) -> None:
    newest = sorted((two_ranks / "checkpoints").glob("step-*.ckpt"))[-1]
    reward = BradleyTerryRM.from_pretrained(newest).score(["Hi"], ["Hello"])
    best = BradleyTerryRM.from_pretrained(two_ranks / "best").score(["Hi"], ["Hello"])
    assert float(reward) == pytest.approx(float(best), abs=1.0)
