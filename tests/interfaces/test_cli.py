"""The commands: what they print, and one sentence for what a user gets wrong."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from rm_optimizer.errors import DataError, TrainingDiverged
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.commands import look_up
from rm_optimizer.records.ledger import progress
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS


def rm_opt(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_the_module_of_the_commands_runs_them():
    command = [sys.executable, "-m", "rm_optimizer.interfaces.cli", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown command 'trian'; did you mean 'train'?")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "error: unknown command 'trian'; did you mean 'train'? Known: analyze, blame, bon, compare"),
        (["data", "chek"], "error: unknown command 'chek'; did you mean 'check'? Known: check"),
        (["score", "model"], "error: give either --prompt TEXT and --response TEXT, or an input and an output file"),
        (["score", "model", "in.csv"], "error: give either --prompt"),
        (["score", "model", "--prompt", "hi"], "error: give either --prompt"),
        (["score", "model", "--prompt", " ", "--response", "r"], "error: --prompt must not be empty"),
        (["score", "./nowhere", "--prompt", "p", "--response", "r"], "error: no model at ./nowhere: "),
        (["data", "check", "nowhere.jsonl"], "error: nowhere.jsonl: no such file"),
        (
            ["data", "check", "x.csv", "--on-bad-row", "dorp"],
            "error: unknown --on-bad-row 'dorp'; did you mean 'drop'?",
        ),
        (
            ["data", "check", "x.csv", "--columns", "a"],
            "error: --columns takes OURS=THEIRS, such as prompt=question, got",
        ),
        (["evaluate", "org/name", "--data", "nowhere.jsonl"], "error: nowhere.jsonl: no such file"),
        (["params", "tinny"], "error: unknown model 'tinny'; did you mean 'tiny'?"),
        (["params", "tiny", "-o", "moun"], "error: unknown optimizer 'moun'; did you mean 'muon'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = rm_opt(*arguments)
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(("error", "code"), [(DataError("no"), 2), (TrainingDiverged("nan"), 3)])
def test_a_failure_keeps_its_exit_code(monkeypatch, error, code):
    def fail() -> None:
        raise error

    monkeypatch.setattr(look_up, "devices", fail)
    result = rm_opt("info")
    assert (result.exit_code, result.stderr) == (code, f"error: {error}\n")


def test_control_c_exits_130(monkeypatch):
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(look_up, "devices", stop)
    assert rm_opt("info").exit_code == 130


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(look_up, "devices", fail)
    assert isinstance(rm_opt("info").exception, ZeroDivisionError)


def test_info_names_versions_devices_presets_and_optimizers():
    result = rm_opt("info")
    assert result.exit_code == 0
    for part in ("python", "torch", "transformers", "accelerator", "presets in", "hardware", *OPTIMIZER_OPTIONS):
        assert part in result.stdout


@pytest.mark.slow
def test_params_counts_every_parameter_once(monkeypatch):
    rows = {name: look_up.groups_of("tiny", name) for name in ("adamw", "muon")}
    total = {name: sum(row.num_parameters for row in groups) for name, groups in rows.items()}
    assert total["adamw"] == total["muon"]
    assert {row.algorithm for row in rows["muon"]} == {"muon", "adamw"}
    monkeypatch.setattr(look_up, "groups_of", lambda model, optimizer: rows[optimizer])
    result = rm_opt("params", "tiny", "-o", "muon")
    assert result.exit_code == 0
    assert "muon on tiny" in result.stdout


def test_progress_without_a_terminal_is_a_line_a_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress("evaluating", "responses") as show:
        for now[0] in (1.0, 30.0, 61.0, 90.0, 125.0):
            show(int(now[0]), 1000)
    lines = ["evaluating: 61 of 1,000 responses, 61 s", "evaluating: 125 of 1,000 responses, 125 s"]
    assert capsys.readouterr().err.splitlines() == lines
