"""Ctrl-C ends a run after the step under way and leaves a checkpoint that loads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy

from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.errors import Interrupted
from rm_optimizer.evaluation import pair_rewards as evaluate
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.callbacks.checkpoints import Checkpoints
from rm_optimizer.training.data import in_memory
from rm_optimizer.training.stopping import StopNow, StopSignal


def wait_for_rows(path: Path, rows: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") > rows:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {rows} rows in {path}: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_says_where(
    python: Path, small_overrides: list[str], tmp_path: Path, number: int
):
    options = [
        *small_overrides,
        "training.max_steps=100000",
        "training.checkpoint_every=2",
        f"hydra.run.dir={tmp_path}/run",
    ]
    command = [python, "-m", "rm_optimizer.train", *options]
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


def test_the_second_signal_stops_at_once_and_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


OPTIONS = ("batching.eval_token_budget=512", "training.max_steps=6")


@pytest.fixture(scope="module")
def whole_run(small_config: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train_reward_model(small_config(tmp_path_factory.mktemp("whole") / "run", *OPTIONS))


def signaled_at(number: signal.Signals, evaluation: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> None:
    """Send this process a signal in the second pass of an evaluation, counted from 0."""
    score = evaluate.score_pairs
    seen = []

    def scored(*args: Any, **kwargs: Any) -> evaluate.PairRewards:
        seen.append(0)
        after = kwargs.pop("after_batch", None)

        def signals(done: int) -> None:
            if after is not None:
                after(done)
            if len(seen) == evaluation + 1:
                for _ in range(times):
                    signal.raise_signal(number)

        return score(*args, **kwargs, after_batch=signals)

    monkeypatch.setattr(in_memory, "score_pairs", scored)


@pytest.mark.parametrize(
    ("evaluation", "step", "where"),
    [(0, 0, "in its evaluation"), (1, 3, "in its evaluation"), (2, 6, "in its evaluation"), (3, 6, "of the best weig")],
    ids=["before-step-1", "between", "after-the-last", "of-the-best"],
)
def test_a_signal_in_an_evaluation_ends_it_and_the_run_resumes_to_the_same_bytes(
    whole_run: RunResult,
    small_config: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
    where: str,
):
    with monkeypatch.context() as patch:
        signaled_at(signal.SIGTERM, evaluation, patch)
        with pytest.raises(Interrupted, match=f"stopped after step {step} of 6.*{where}.*resume=auto") as caught:
            train_reward_model(small_config(tmp_path, *OPTIONS))
    assert f"step-{step:08d}.ckpt" in str(caught.value)
    assert ("best.ckpt" in str(caught.value)) == (tmp_path / "checkpoints" / "best.ckpt").exists() == (step > 0)
    assert not (tmp_path / "run.json").exists()
    train_reward_model(small_config(tmp_path, *OPTIONS, "resume=auto"))
    for name in ("metrics.csv", "best/model.safetensors", "pair_rewards.jsonl"):
        assert (tmp_path / name).read_bytes() == (Path(whole_run.run_dir) / name).read_bytes(), name


def test_a_second_signal_in_an_evaluation_says_what_there_is(
    small_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    signaled_at(signal.SIGINT, 0, monkeypatch, times=2)
    with pytest.raises(Interrupted, match=r"stopped at once.*nothing was saved yet"):
        train_reward_model(small_config(tmp_path, *OPTIONS))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_signal_that_comes_while_the_processes_agree_is_not_lost(tmp_path):
    stop = StopSignal()

    def agree(requested: bool, *, all: bool) -> bool:
        stop.requested = True  # what the signal's handler does
        return requested

    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce_boolean_decision=agree), should_stop=False)
    checkpoints = Checkpoints(tmp_path, every=1, keep=1, stop=stop)
    assert not checkpoints._stops(trainer)  # type: ignore[arg-type]
    assert stop.requested
    assert checkpoints._stops(trainer)  # type: ignore[arg-type]
    assert trainer.should_stop


def test_a_signal_of_another_process_after_the_last_step_ends_all_of_them(
    small_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []

    def agree(strategy: SingleDeviceStrategy, decision: bool, all: bool = True) -> bool:
        asked.append(decision)
        return len(asked) == 5  # after training; the four before are its start and the steps

    monkeypatch.setattr(SingleDeviceStrategy, "reduce_boolean_decision", agree)
    with pytest.raises(Interrupted, match=r"stopped after step 3 of 3.*step-00000003\.ckpt.*resume=auto"):
        train_reward_model(small_config(tmp_path, "training.max_steps=3"))
    assert asked == [False] * 5
