"""A run folder belongs to one run: no other starts, continues or works in it at the same time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rm_optimizer.errors import CheckpointError, ConfigError, RMOptimizerError
from rm_optimizer.records.run_folder import RunFolder, read_rows, require_usable
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.folder.lock import require_free, run_lock
from rm_optimizer.training.folder.record import RunStatus
from rm_optimizer.training.folder.start import begin

Build = Callable[..., TrainConfig]
OUTCOMES = ("metrics.csv", "best/model.safetensors")


@pytest.fixture
def used(finished_run: RunResult, tmp_path: Path) -> Path:
    """A copy of the folder of a finished run."""
    return Path(shutil.copytree(finished_run.run_dir, tmp_path / "used"))


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def assert_same_outcome(left: Path, right: Path) -> None:
    for name in OUTCOMES:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def keep_only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_second_run_in_a_used_folder_is_refused_and_changes_nothing(used: Path, small_config: Build):
    before = snapshot(used)
    with pytest.raises(ConfigError, match=r"already holds checkpoints/.*resume=auto.*resume=restart.*hydra\.run\.dir"):
        train_reward_model(small_config(used, "seed=7"))
    assert snapshot(used) == before


@pytest.mark.parametrize("left", ["checkpoints", "best", "run.json", "evaluations", "metrics.csv"])
def test_what_is_left_of_a_run_is_refused_too(used: Path, small_config: Build, left: str):
    keep_only(used, left)
    with pytest.raises(ConfigError, match=left):
        require_usable(small_config(used))


def test_a_link_to_a_used_folder_is_refused(used: Path, small_config: Build, tmp_path: Path):
    (tmp_path / "link").symlink_to(used)
    with pytest.raises(ConfigError, match="already holds"):
        require_usable(small_config(tmp_path / "link"))


def test_files_of_other_kinds_are_no_run(small_config: Build, tmp_path: Path):
    for name in ("notes.txt", "plots/old.png", "checkpoints/other.ckpt", "options.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    before = snapshot(tmp_path)
    require_usable(small_config(tmp_path))
    assert snapshot(tmp_path) == before


def test_the_start_of_a_run_that_left_no_result_is_no_run(used: Path, small_config: Build):
    keep_only(used, "options.json", "identity.json", "skipped_rows.txt")
    before = snapshot(used)
    require_usable(small_config(used, "seed=7"))
    assert snapshot(used) == before


def test_a_file_that_a_run_would_overwrite_is_not_overwritten(small_config: Build, tmp_path: Path):
    (tmp_path / "metrics.csv").write_text("mine")
    for resume in ("none", "auto", "restart"):
        with pytest.raises(ConfigError, match=r"already holds metrics\.csv, which a run would overwrite"):
            require_usable(small_config(tmp_path, f"resume={resume}"))


@pytest.mark.parametrize("resume", ["none", "auto", "restart"])
def test_a_folder_that_the_export_could_not_replace_is_refused_at_once(
    resume: str, small_config: Build, tmp_path: Path
):
    (tmp_path / "best").mkdir()
    require_usable(small_config(tmp_path, f"resume={resume}"))
    (tmp_path / "best" / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="best is where a run puts its model, but holds no export of ours"):
        require_usable(small_config(tmp_path, f"resume={resume}"))


def test_a_finished_run_stays_as_it_is(used: Path, finished_run: RunResult, small_config: Build):
    before = snapshot(used)
    result = train_reward_model(small_config(used, "resume=auto", "training.num_bootstrap=200"))
    assert snapshot(used) == before
    assert (result.steps, result.pairs_per_second) == (finished_run.steps, finished_run.pairs_per_second)


def test_an_early_stopped_run_stays_as_it_is(small_config: Build, tmp_path: Path):
    stopping = ["training.early_stopping.enabled=true", "training.early_stopping.patience=1"]
    options = [*stopping, "training.early_stopping.min_delta=9", "training.max_steps=30"]
    assert train_reward_model(small_config(tmp_path, *options)).status == RunStatus.early_stopped
    before = snapshot(tmp_path)
    again = train_reward_model(small_config(tmp_path, *options, "resume=auto"))
    assert (again.status, snapshot(tmp_path)) == (RunStatus.early_stopped, before)
    (tmp_path / "run.json").unlink()  # as after a kill between the last checkpoint and the result
    finished = train_reward_model(small_config(tmp_path, *options, "resume=auto"))
    assert (finished.status, finished.steps) == (RunStatus.early_stopped, again.steps)
    assert finished.pairs_per_second is None


def test_restart_removes_the_run_and_keeps_the_rest(used: Path, finished_run: RunResult, small_config: Build):
    old = [
        "evaluations/step-00000099/metrics.json",
        "landscape/hessian/hessian.json",
        "tensorboard/events.1",
        "plots/a",
    ]
    for name in ["notes.txt", *old, "checkpoints/step-00000099.ckpt"]:
        (used / name).parent.mkdir(parents=True, exist_ok=True)
        (used / name).write_text("old")
    before = RunFolder(used).identity
    train_reward_model(small_config(used, "resume=restart"))
    assert (used / "notes.txt").is_file()
    assert not any((used / name).exists() for name in [*old, "checkpoints/step-00000099.ckpt"])
    assert_same_outcome(Path(finished_run.run_dir), used)
    assert RunFolder(used).identity != before


def test_pairs_of_a_start_that_failed_are_not_those_of_the_run(small_config: Build, tmp_path: Path):
    (tmp_path / "trained_pairs.npz").write_text("of a start that failed")
    begin(small_config(tmp_path), is_first_rank=True)
    assert not (tmp_path / "trained_pairs.npz").exists()


def test_two_processes_in_one_folder_are_refused(used: Path, small_config: Build):
    with run_lock(used):
        for resume in ("none", "auto", "restart"):
            with pytest.raises(ConfigError, match=rf"is in use: process {os.getpid()} on .* trains in it"):
                train_reward_model(small_config(used, f"resume={resume}"))
        with pytest.raises(ConfigError, match="is in use"):
            require_free(used)
    require_free(used)


def test_a_killed_process_leaves_no_lock(tmp_path: Path):
    holds = "import sys, time; from pathlib import Path; from rm_optimizer.training.folder.lock import run_lock\n"
    holds += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {process.pid} on"):
        require_free(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    with run_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import errno

    from rm_optimizer.training.folder import lock as module

    def has_none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", has_none)
    with run_lock(tmp_path):
        assert "has no locks (No locks available); do not start a second run" in caplog.text


def test_checkpoints_of_another_run_are_refused(used: Path, small_config: Build):
    (used / "run.json").unlink()
    (used / "identity.json").write_text((used / "identity.json").read_text().replace('"run_id": "', '"run_id": "0'))
    with pytest.raises(CheckpointError, match=r"step-00000006\.ckpt belongs to run .*, but the folder to run 0"):
        train_reward_model(small_config(used, "resume=auto"))


def test_checkpoints_without_a_run_are_refused(used: Path, small_config: Build):
    keep_only(used, "checkpoints")
    path = used / "checkpoints" / "step-00000006.ckpt"
    content = torch.load(path, weights_only=True)
    del content["rm_optimizer"]["run"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="does not name its run"):
        train_reward_model(small_config(used, "resume=auto"))


def test_checkpoints_alone_know_their_options(used: Path, small_config: Build):
    keep_only(used, "checkpoints")
    with pytest.raises(ConfigError, match=r"loss\.beta was 1\.0, is 2\.0"):
        train_reward_model(small_config(used, "resume=auto", "loss.beta=2"))


def test_changed_pairs_are_refused_and_moved_ones_are_not(small_config: Build, tmp_path: Path):
    rows = [{"prompt": f"Say {i}", "chosen": f"{i} it is", "rejected": "no"} for i in range(24)]

    def write(path: Path, **changed: str) -> str:
        path.write_text("".join(json.dumps(row | changed) + "\n" for row in rows))
        return f"data.train={path}"

    run_dir, common = tmp_path / "run", ["data.val_fraction=0.3", "training.max_steps=1"]
    train_reward_model(small_config(run_dir, *common, write(tmp_path / "a.jsonl")))
    extended = [*common[:1], "training.max_steps=2", "resume=auto"]
    before = snapshot(run_dir)
    with pytest.raises(ConfigError, match=r"the pairs of data\.train have changed \(fingerprint was"):
        train_reward_model(small_config(run_dir, *extended, write(tmp_path / "a.jsonl", rejected="never")))
    assert snapshot(run_dir) == before
    assert train_reward_model(small_config(run_dir, *extended, write(tmp_path / "b.jsonl"))).steps == 2


@pytest.mark.parametrize("schedule", [pytest.param("constant", marks=pytest.mark.slow), "cosine"])
def test_a_run_can_be_made_longer(small_config: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str):
    common = [f"schedule.name={schedule}", "schedule.warmup_ratio=0", "training.checkpoint_every=3"]
    long, cut = tmp_path / "long", tmp_path / "cut"
    train_reward_model(small_config(cut, *common, "training.max_steps=3"))
    result = train_reward_model(small_config(cut, *common, "training.max_steps=6", "resume=auto"))
    train_reward_model(small_config(long, *common, "training.max_steps=6"))
    assert result.extensions == ({"after_step": 3, "from_steps": 3, "to_steps": 6},)
    assert "the run is extended from 3 to 6 steps after step 3" in caplog.text
    rates = [[row["lr"] for row in read_rows(folder / "metrics.csv")][4:] for folder in (cut, long)]
    assert rates[0] == rates[1]
    if schedule == "constant":
        assert_same_outcome(cut, long)
    else:
        assert "differs from a run that was started with 6 steps" in caplog.text


@pytest.mark.parametrize("options", [["training.max_steps=5"], ["training.epochs=0.5"]])
def test_a_run_cannot_be_made_shorter(used: Path, small_config: Build, options: list[str]):
    before = snapshot(used)
    with pytest.raises(ConfigError, match="makes a run longer, not shorter"):
        train_reward_model(small_config(used, "resume=auto", *options))
    assert snapshot(used) == before


def test_a_finished_run_without_checkpoints_is_not_extended(used: Path, small_config: Build):
    shutil.rmtree(used / "checkpoints")
    with pytest.raises(ConfigError, match="needs a checkpoint to extend"):
        train_reward_model(small_config(used, "resume=auto", "training.max_steps=9"))


@pytest.mark.parametrize("name", ["run.write_record", "fitting.write_evaluation", "fitting.write_pair_rewards"])
def test_a_run_killed_between_two_writes_goes_on(
    small_config: Build, finished_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def dies(*_: object, **__: object) -> None:
        raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(f"rm_optimizer.training.{name}", dies)
        with pytest.raises(MemoryError):
            train_reward_model(small_config(tmp_path))
    train_reward_model(small_config(tmp_path, "resume=auto"))
    assert_same_outcome(Path(finished_run.run_dir), tmp_path)


def test_lost_best_weights_are_said(used: Path, small_config: Build, caplog: pytest.LogCaptureFixture):
    for name in ("run.json", "checkpoints/best.ckpt", "checkpoints/step-00000006.ckpt"):
        (used / name).unlink()
    result = train_reward_model(small_config(used, "resume=auto"))
    assert "best.ckpt is missing; only evaluations from step 3 on can be the best" in caplog.text
    assert result.best_step == 6


def test_a_read_only_folder_is_a_sentence(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(RMOptimizerError, match="cannot be written"), run_lock(tmp_path):
        pass
