"""A sweep outlives its jobs, and ends with what each came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig
from typer.testing import CliRunner

from rm_optimizer import train
from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError, TrainingDiverged
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.sweep import Sweep
from tests.training.conftest import SMALL

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none", "model=tiny")


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a sweep whose jobs end as a function of their configuration says; gives exit code, stdout and stderr."""

    def run(arguments: list[str], ends: dict[float, RMOptimizerError | float]) -> tuple[int, str, str]:
        def trained(config: DictConfig) -> float:
            end = ends[config.optimizer.lr]
            if isinstance(end, RMOptimizerError):
                raise end
            return end

        monkeypatch.setattr(train, "_trained", trained)
        monkeypatch.setattr(train, "SWEEP", Sweep())
        command = ["rm-opt train", *QUIET, f"hydra.sweep.dir={tmp_path}", *arguments, "--multirun"]
        monkeypatch.setattr(sys, "argv", command)
        code = 0
        try:
            train.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_failed_job_does_not_end_a_sweep_and_is_in_its_table(sweep, tmp_path: Path):
    ends = {1.0: TrainingDiverged("the loss became nan"), 2.0: ConfigError("no such thing"), 3.0: 0.5}
    code, out, errors = sweep(["optimizer.lr=1.0,2.0,3.0"], ends)
    assert code == 3
    assert errors.splitlines() == ["error: the loss became nan", "error: no such thing"]
    lines = out.strip().splitlines()
    assert lines[0].split() == ["job", "status", "val/nll", "folder", "options"]
    assert lines[1].split() == ["0", "diverged", "-", str(tmp_path / "0"), "optimizer.lr=1.0"]
    assert lines[2].split()[1] == "failed"
    assert lines[3].split() == ["2", "finished", "0.5000", str(tmp_path / "2"), "optimizer.lr=3.0"]
    assert "job 0: the loss became nan" in lines
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert [job["status"] for job in stored] == ["diverged", "failed", "finished"]


def test_a_sweep_whose_jobs_all_finish_exits_with_0(sweep):
    code, out, _ = sweep(["optimizer.lr=1.0,2.0"], {1.0: 0.6, 2.0: 0.5})
    assert code == 0
    assert out.count("finished") == 2


def test_a_stop_ends_the_sweep_with_its_table_so_far(sweep):
    code, out, errors = sweep(["optimizer.lr=1.0,2.0,3.0"], {1.0: 0.6, 2.0: Interrupted("stopped after step 3")})
    assert code == 130
    assert [line.split()[1] for line in out.strip().splitlines()[1:3]] == ["finished", "stopped"]
    assert errors == "error: stopped after step 3\n"


@pytest.mark.slow
def test_a_finished_sweep_compares_its_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(train, "SWEEP", Sweep())
    swept = [f"hydra.sweep.dir={tmp_path}", "optimizer.lr=1e-3,1e-5", "seed=0,1", "--multirun"]
    monkeypatch.setattr(sys, "argv", ["rm-opt train", *QUIET, *SMALL, *swept])
    train.main()
    out = capsys.readouterr().out
    assert "4 runs on 33 common validation pairs" in out
    assert "Difference to lr=0.001, paired by prompt and seed" in out
    files = {path.name for path in (tmp_path / "comparison").iterdir()}
    assert files == {"comparison.json", "comparison.parquet", "curves.png", "differences.png"}
    again = CliRunner().invoke(app, ["compare", str(tmp_path), "--output", str(tmp_path / "again")])
    assert (again.exit_code, again.output.count("paired by prompt and seed")) == (0, 1)
    assert (tmp_path / "again/comparison.json").read_text() == (tmp_path / "comparison/comparison.json").read_text()


def test_jobs_that_left_no_run_are_not_compared(sweep):
    out = sweep(["optimizer.lr=1.0,2.0"], {1.0: 0.6, 2.0: 0.5})[1]
    assert "no comparison: runs must be folders that rm-opt train wrote" in out


@pytest.mark.parametrize("name", ["sensitivity_lr", "sensitivity_warmup", "sensitivity_smoothing"])
def test_a_preset_of_a_sweep_is_refused_without_multirun(name: str):
    with pytest.raises(ConfigError, match=rf"^experiment={name} is a sweep over \S+, .* add --multirun$"):
        train.check_command(["model=tiny", f"experiment={name}"])


def test_a_preset_of_a_sweep_can_be_printed_and_swept():
    train.check_command(["model=tiny", "experiment=sensitivity_lr", "--cfg", "job"])
    train.check_command(["model=tiny", "experiment=sensitivity_lr", "--multirun"])
