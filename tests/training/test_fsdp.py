"""FSDP2 on two gloo processes: one device's gradients, weights, evaluation and checkpoints, and exact resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.core.data_loader import load_training_data
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.pair_rewards import score_pairs
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from tests.training.launched import (
    TOLERANCE,
    assert_same_bytes,
    assert_same_trajectory,
    environment,
    forget_after,
    on_ranks,
    run_to_its_end,
    train_on_two_ranks,
)
from tests.training.sharded_worker import CASES, SHARDABLE

Build = Callable[..., TrainConfig]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_torchrun.sh"

# every second step is one pair, which one rank does not have
OPTIONS = ["batching.batch_size=95", "training.epochs=2", "training.checkpoint_every=1", "training.keep_checkpoints=9"]
FLOAT64 = 1e-12
# autocast rounds alike on both sides; the float32 gradients of three passes are summed in another order
BFLOAT16 = 1e-6


@pytest.fixture(scope="module")
def measured(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("measured")
    start = [python, "-m", "tests.training.sharded_worker", str(folder)]
    ranks = [subprocess.Popen([*start, str(rank)], cwd=ROOT, env=environment()) for rank in range(2)]
    assert [rank.wait(timeout=400) for rank in ranks] == [0, 0]
    values: dict[str, float] = json.loads((folder / "measured.json").read_text())
    return values


@pytest.fixture(scope="module")
def one_process(small_config: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_reward_model(small_config(folder, *OPTIONS))
    return folder


@pytest.fixture(scope="module")
def folders_of_torchrun(
    python: Path, small_overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """What `outputs/train` holds after torchrun's processes each took the time for its name."""
    cwd = tmp_path_factory.mktemp("torchrun")
    found = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}  # torchrun
    overrides = [line for line in on_ranks([*small_overrides, *OPTIONS]) if not line.startswith("hardware=")]
    command = ["bash", str(SCRIPT), *overrides]  # which names the hardware itself
    run_to_its_end(command, cwd, DEVICES="2", STRATEGY="fsdp", **found)
    return list(cwd.glob("outputs/train/*/*"))


@pytest.fixture(scope="module")
def sharded(folders_of_torchrun: list[Path]) -> Path:
    return folders_of_torchrun[0]


@pytest.mark.slow
def test_processes_of_torchrun_share_one_run_folder(folders_of_torchrun: list[Path]):
    assert len(folders_of_torchrun) == 1
    assert (folders_of_torchrun[0] / "run.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_uneven_micro_batches_give_the_gradient_of_one_device(measured: dict[str, float], case: str):
    assert measured[f"gradient of {case}"] < (BFLOAT16 if case == "bfloat16" else FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDABLE)
def test_an_optimizer_steps_shards_as_it_steps_wholes(measured: dict[str, float], name: str):
    assert measured[f"weights of {name}"] < FLOAT64


@pytest.mark.slow
def test_muon_orthogonalizes_whole_matrices(measured: dict[str, float]):
    assert measured["muon"] == 0


@pytest.mark.slow
def test_evaluation_is_exact_with_fewer_batches_than_ranks(measured: dict[str, float]):
    assert measured["evaluation"] == 0


@pytest.mark.slow
def test_shards_follow_the_trajectory_of_one_process(sharded: Path, one_process: Path):
    assert_same_trajectory(one_process, sharded)


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_that_of_one_process(sharded: Path, one_process: Path):
    name = "checkpoints/step-00000004.ckpt"
    ours, theirs = (dict(tensors(torch.load(folder / name, weights_only=True))) for folder in (sharded, one_process))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=TOLERANCE, rtol=0)


def tensors(content: dict[str, object]) -> list[tuple[str, Tensor]]:
    """Weights and optimizer state by name."""
    weights = [(f"weight {name}", value) for name, value in content["state_dict"].items()]  # type: ignore[attr-defined]
    states = content["optimizer_states"][0]["state"]  # type: ignore[index]
    return weights + [(f"{name} of {key}", value) for key, state in states.items() for name, value in state.items()]


@pytest.mark.slow
def test_a_checkpoint_of_shards_gives_its_rewards_on_one_device(sharded: Path, small_config: Build):
    config = small_config(sharded)
    val = load_training_data(config.data).val
    model = BradleyTerryRM.from_pretrained(sharded / "checkpoints" / "best.ckpt")
    tokens = tokenize_pairs(val.pairs, model.renderer, None)
    scored = score_pairs(model, tokens, val, token_budget=config.batching.eval_token_budget, prefix_sharing=True)
    rows = [json.loads(line) for line in (sharded / "pair_rewards.jsonl").read_text().splitlines()]
    assert scored.chosen.tolist() == [row["chosen"] for row in rows]
    assert scored.rejected.tolist() == [row["rejected"] for row in rows]


@pytest.mark.slow
def test_killed_shards_resume_to_the_same_bytes(
    python: Path, sharded: Path, small_overrides: list[str], tmp_path: Path
):
    shutil.copytree(sharded, tmp_path / "cut")
    forget_after(2, tmp_path / "cut")
    train_on_two_ranks(tmp_path / "cut", [*small_overrides, *OPTIONS, "resume=auto"], "fsdp", python)
    assert_same_bytes(sharded, tmp_path / "cut")


@pytest.mark.parametrize("optimizer", ["adafactor", "soap", "scion"])
def test_an_optimizer_that_needs_wholes_is_refused(small_config: Build, tmp_path: Path, optimizer: str):
    with pytest.raises(ConfigError, match=rf"optimizer={optimizer} does not go with hardware\.strategy=fsdp2"):
        train_reward_model(small_config(tmp_path, "hardware=fsdp", f"optimizer={optimizer}"))
