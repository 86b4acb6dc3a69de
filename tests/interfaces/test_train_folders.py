"""`rm-opt train` refuses a folder of another run before Hydra writes into it, alone and in a sweep."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rm_optimizer import train as entry
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces import command_line
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.folder import lock as run_lock_module
from rm_optimizer.training.folder.lock import require_free, run_lock
from tests.training.conftest import SMALL

FEW = [line for line in SMALL if "synthetic" not in line]
FEW += ["data.synthetic.num_train=16", "data.synthetic.num_val=6", "training.max_steps=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_reward_model(typed(compose([*FEW, f"output_dir={folder}"]), TrainConfig))
    return folder


@pytest.fixture
def used(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "used"))


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_used_folder_is_refused_before_anything_is_written(used: Path):
    before = snapshot(used)
    with pytest.raises(ConfigError, match="resume=auto continues that run"):
        entry.check_command([*FEW, f"hydra.run.dir={used}"])
    assert snapshot(used) == before


@pytest.mark.parametrize("named", [[], ["hydra.run.dir={}/hydra"]])
def test_hydra_writes_into_the_output_folder_unless_it_has_one(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = [*FEW, f"output_dir={tmp_path}/run", *(part.format(tmp_path) for part in named)]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    monkeypatch.setattr(entry, "_trained", lambda options: Path(options.output_dir))
    entry.main()
    folder = tmp_path / ("hydra" if named else "run")
    assert OmegaConf.load(folder / ".hydra" / "overrides.yaml") == arguments[: len(FEW) + 1]


def test_a_process_that_lightning_starts_takes_the_folder_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    repeated = [f'hydra.run.dir="{tmp_path}"', "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null"]
    _, composed = entry.check_command([*FEW, f"hydra.run.dir={tmp_path}", *repeated])
    assert composed is not None
    assert composed.options.output_dir == str(tmp_path)


def test_a_finished_run_is_shown_again_and_not_touched(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = snapshot(used)
    monkeypatch.setattr(sys, "argv", ["train", *FEW, f"hydra.run.dir={used}", "resume=auto"])
    entry.main()
    printed = capsys.readouterr().out
    assert "finished after step 1; nothing is changed" in " ".join(printed.split())
    assert snapshot(used) == before


@pytest.mark.parametrize("begin", [["hydra.run.dir={}"], ["--multirun", "seed=0,1", "hydra.sweep.dir={}"]])
def test_hydra_writes_only_into_a_folder_that_no_other_process_has(
    begin: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    launched: list[str] = []

    def launch(line: object, task: object) -> None:
        with pytest.raises(ConfigError, match="is in use"):
            require_free(tmp_path / "run")
        with run_lock(tmp_path / "run"):
            launched.append(sys.argv[-1])

    monkeypatch.setattr(command_line.CommandLine, "launch", launch)
    monkeypatch.setattr(command_line.Composed, "run", launch)
    arguments = ["train", *FEW, *(part.format(tmp_path / "run") for part in begin)]
    monkeypatch.setattr(sys, "argv", list(arguments))
    entry.main()
    assert len(launched) == 1
    with run_lock(tmp_path / "run"):  # since another run's check of the folder
        monkeypatch.setattr(run_lock_module, "require_free", lambda folder: None)
        monkeypatch.setattr(sys, "argv", list(arguments))
        with pytest.raises(SystemExit, match="2"):
            entry.main()
    assert f"choose another {begin[-1].split('=')[0]}" in capsys.readouterr().err
    assert len(launched) == 1


@pytest.mark.parametrize("shared", ["output_dir=one", "hydra.sweep.subdir=one", "hydra.sweep.subdir=${optimizer.name}"])
def test_two_jobs_of_a_sweep_in_one_folder_are_refused(shared: str):
    with pytest.raises(ConfigError, match="each job of a sweep needs its own folder"):
        entry.check_command(["--multirun", *FEW, "seed=0,1", shared])


@pytest.mark.parametrize(
    ("job", "changes", "says"),
    [
        ("0", ["seed=3,4"], "already holds checkpoints"),
        ("0", ["seed=0,1", "resume=auto", "optimizer.lr=0.5"], "optimizer.lr was .*, is 0.5; set them back"),
        ("5", ["seed=1,0", "optimizer.lr=1,2,3"], "already holds checkpoints"),  # a job without a value of its own
    ],
)
def test_a_sweep_over_a_used_folder_is_refused_before_its_first_job(
    job: str, changes: list[str], says: str, used: Path
):
    (used.parent / job).symlink_to(used)
    before = snapshot(used.parent)
    with pytest.raises(ConfigError, match=f"{says}.*choose another hydra.sweep.dir"):
        entry.check_command(["--multirun", *FEW, *changes, f"hydra.sweep.dir={used.parent}"])
    assert snapshot(used.parent) == before


def test_a_finished_sweep_may_be_continued_and_extended(used: Path):
    (used.parent / "0").symlink_to(used)
    before = snapshot(used.parent)
    entry.check_command(["--multirun", *FEW, "seed=0,1", "resume=auto", f"hydra.sweep.dir={used.parent}"])
    assert snapshot(used.parent) == before
