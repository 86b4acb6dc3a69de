"""`rm-opt ensemble train` starts one run a member, which goes on where an earlier command was stopped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.commands import ensemble


@pytest.mark.parametrize(("given", "resume"), [([], "resume=auto"), (["resume=restart"], "resume=restart")])
def test_members_resume_unless_told_otherwise(
    given: list[str], resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
