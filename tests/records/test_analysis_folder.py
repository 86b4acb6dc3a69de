"""Analyses of one run stand side by side; a folder of the user's own is not overwritten by another analysis."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from rm_optimizer.analyze import analyze, read
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.records.files import held
from rm_optimizer.records.run_folder import RunIdentity, results_folder
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.landscape import AnalyzeConfig


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    data = tmp_path / "pairs.jsonl"
    data.write_text("{}\n")
    config = checked(["data.train=pairs.jsonl", "output_dir=any"], TrainConfig, writable=False)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "options.json").write_text(json.dumps(asdict(config), default=str))
    sources = {"train": str(data), "val": None}
    identity = RunIdentity(run_id="0", directory=".", sources=sources, train_fingerprint="a", val_fingerprint="b")
    (folder / "identity.json").write_text(identity.to_json())
    return folder


def composed(checkpoint: Path, *overrides: str) -> AnalyzeConfig:
    arguments = read([f"checkpoint='{checkpoint}'", *overrides]).overrides
    return checked(arguments, AnalyzeConfig, name="analyze", writable=False)


def claimed(config: AnalyzeConfig) -> Path:
    """The folder, with the record that an analysis leaves in it."""
    folder = results_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "analysis.json").write_text(json.dumps({"options": asdict(config)}, default=str))
    return folder


def test_another_checkpoint_or_other_options_have_a_folder_of_their_own(run_dir: Path):
    step = run_dir / "checkpoints" / "step-00000010.ckpt"
    folders = [
        claimed(composed(run_dir)),
        claimed(composed(step)),
        claimed(composed(run_dir, "landscape.num_pairs=16")),
        claimed(composed(run_dir, "landscape.params=head")),
        claimed(composed(run_dir, "landscape=density")),
    ]
    names = ["hessian", "hessian-step-00000010", "hessian-2", "hessian-3", "density"]
    assert [folder.relative_to(run_dir / "landscape").as_posix() for folder in folders] == names


def test_the_same_analysis_goes_on_in_its_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    claimed(composed(run_dir))
    second = claimed(composed(run_dir, "seed=3"))
    assert results_folder(composed(run_dir, "seed=3", "progress=false", "landscape.token_budget=64")) == second
    monkeypatch.chdir(run_dir.parent)
    assert results_folder(composed(Path("run"), "seed=3")) == Path("run/landscape/hessian-2")


def test_a_folder_of_the_users_own_is_not_overwritten(run_dir: Path, tmp_path: Path):
    mine = f"output_dir={tmp_path / 'mine'}"
    claimed(composed(run_dir, mine))
    assert results_folder(composed(run_dir, mine)) == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"results of another analysis \(checkpoint=.*run, landscape=hessian"):
        results_folder(composed(run_dir / "best", mine))


def test_two_analyses_at_once_do_not_share_a_folder(run_dir: Path, tmp_path: Path):
    folder = results_folder(composed(run_dir))
    with held(folder, "analysis"):
        with (
            ThreadPoolExecutor() as other,
            pytest.raises(ConfigError, match=r"hessian is in use: another process writes an analysis there; wait for"),
        ):
            other.submit(analyze, composed(run_dir, "seed=3")).result()
        with held(tmp_path / "other", "analysis"):
            pass
    assert not folder.exists()
    assert not (tmp_path / "other").exists()
    folder.mkdir()
    with held(folder, "analysis"):
        (folder / "hessian.json").touch()
    with held(folder, "analysis"):
        pass
    assert folder.exists()


def test_the_pairs_of_a_run_are_found_from_anywhere(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pairs.jsonl").write_text("another file")
    monkeypatch.chdir(elsewhere)
    assert composed(run_dir).data.train == str(tmp_path / "pairs.jsonl")


def test_pairs_that_are_gone_are_a_sentence(run_dir: Path, tmp_path: Path):
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"pairs\.jsonl, which the run in .* was trained on, is no longer there.*--data"
    ):
        composed(run_dir)
    assert composed(run_dir, "data.train=other.jsonl").data.train == "other.jsonl"


def test_the_holder_of_a_folder_removes_what_killed_processes_left_and_nothing_else(tmp_path: Path):
    for name in (".best.99999991.writing", ".old.99999991.earlier", ".gone.99999991.earlier", "old", ".cache"):
        (tmp_path / name).mkdir()
    kept = [".rows.csv.tmp", f".rows.csv.{os.getpid()}.tmp", "rows.csv"]
    for name in (".rows.csv.99999991.tmp", *kept):
        (tmp_path / name).touch()
    with held(tmp_path, "analysis"), held(tmp_path, "analysis"):
        found = {path.name for path in tmp_path.iterdir()}
    assert found == {"old", ".cache", ".gone.99999991.earlier", *kept}
