"""`rm-opt ensemble train` makes one run a member, which goes on where an earlier command was stopped."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.interfaces.commands import ensemble
from rm_optimizer.rl_coupling import load_ensemble
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training.run import train_reward_model
from tests.builders import NARROW, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("given", "resume"), [([], "resume=auto"), (["resume=restart"], "resume=restart")])
def test_members_resume_unless_told_otherwise(
    given: list[str], resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[list[str]] = []

    def fails(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        return subprocess.CompletedProcess(command, 6)

    monkeypatch.setattr(ensemble.subprocess, "run", fails)
    folder = tmp_path / "it's mine"
    found = CliRunner().invoke(app, ["ensemble", "train", "--output", str(folder), *given])
    assert found.exit_code == 6, found.output
    (command,) = started
    assert [item for item in command if item.startswith("resume=")] == [resume]
    assert command[-1] == f"hydra.run.dir='{tmp_path}/it\\'s mine/seed-0'"


def test_adapters_on_one_base_are_members_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def here(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        train_reward_model(checked(command[command.index("rm_optimizer.train") + 1 :], TrainConfig))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(ensemble, "subprocess", SimpleNamespace(run=here))
    tokenizer = tiny_tokenizer("llama")
    tiny_model("llama", tokenizer, **NARROW).base_model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = (
        f"model.path={tmp_path}/base",
        "model.max_length=128",
        "adapter=lora",
        "adapter.rank=2",
        "training.max_steps=2",
    )
    sizes = (
        "data.synthetic.num_train=32",
        "data.synthetic.num_val=80",
        "training.num_bootstrap=100",
        "training.progress=false",
    )
    found = CliRunner().invoke(
        app, ["ensemble", "train", "--seeds", "2", "--output", str(tmp_path / "e"), *options, *sizes]
    )
    assert found.exit_code == 0, found.output
    loads: list[str] = []

    def load(source: str) -> BradleyTerryRM:
        loads.append(source)
        return BradleyTerryRM.from_pretrained(source)

    members = load_ensemble(tmp_path / "e", load=load)
    rewards = members.member_rewards(["Hi", "Hi"], ["Yes.", "No, never."])
    assert [Path(source).parts[-2:] for source in loads] == [("seed-0", "adapter")]
    merged = [BradleyTerryRM.from_pretrained(tmp_path / "e" / f"seed-{seed}") for seed in range(2)]
    expected = [model.score(["Hi", "Hi"], ["Yes.", "No, never."]).tolist() for model in merged]
    assert rewards == pytest.approx(np.array(expected), abs=1e-5)
    assert abs(expected[0][0] - expected[1][0]) > 1e-4


@pytest.mark.parametrize(("kind", "path"), [("none", "base"), ("lora", None), ("lora", "base.ckpt")])
def test_members_whose_base_cannot_be_loaded_again_are_whole(
    kind: str, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.ckpt").write_bytes(b"")
    config = SimpleNamespace(adapter=SimpleNamespace(kind=kind), model=SimpleNamespace(path=path))
    assert ensemble._member(tmp_path, config) == str(tmp_path / "best")  # type: ignore[arg-type]
