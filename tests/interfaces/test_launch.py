"""`rm-opt train` becomes `python -m rm_optimizer.train`, flag by flag."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.command_line import CommandLine
from rm_optimizer.interfaces.launch import become, quoted
from rm_optimizer.schema import TrainConfig

MODULE = ["-m", "rm_optimizer.train"]
SUGAR = [
    ([], []),
    (["--model", "tiny"], ["model=tiny"]),
    (["-m", "tiny", "-o", "muon"], ["model=tiny", "optimizer=muon"]),
    (["--optimizer", "lion"], ["optimizer=lion"]),
    (["--epochs", "3"], ["training.epochs=3"]),
    (["-e", "0.5", "-b", "64"], ["training.epochs=0.5", "batching.batch_size=64"]),
    (["--batch-size", "8"], ["batching.batch_size=8"]),
    (["--data", "default"], ["data=default"]),
    (["--data", "pairs.jsonl"], ["data.train=pairs.jsonl"]),
    (["-d", "org/preferences"], ["data.train=org/preferences"]),
    (["-d", "folder"], ["data.train=folder"]),
    (["-d", "my pairs.csv"], ["data.train='my pairs.csv'"]),
    (["-d", "../a=b/it's.csv"], ["data.train='../a=b/it\\'s.csv'"]),
    (["-m", "tiny", "optimizer.lr=1e-3", "--cfg", "job"], ["model=tiny", "optimizer.lr=1e-3", "--cfg", "job"]),
    (["seed=1", "-m", "tiny"], ["model=tiny", "seed=1"]),
    (["-o", "muon", "optimizer=adamw"], ["optimizer=muon", "optimizer=adamw"]),
    (["--multirun", "seed=1,2"], ["--multirun", "seed=1,2"]),
    (["-cd", "presets", "experiment=mine"], ["--config-dir", "presets", "experiment=mine"]),
    (["~logger", "+data.columns={prompt: q}"], ["~logger", "+data.columns={prompt: q}"]),
    (["-m", "models/llama"], ["model.path=models/llama"]),
    (["-m", "org/model-7b"], ["model.path=org/model-7b"]),
    (["--batch", "3"], ["--batch", "3"]),
]


@pytest.mark.parametrize(("typed", "overrides"), SUGAR, ids=[" ".join(typed) or "nothing" for typed, _ in SUGAR])
def test_flags_are_sugar_for_overrides(typed, overrides, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    became = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append((program, command)))
    result = CliRunner().invoke(app, ["train", *typed])
    assert result.exit_code == 0, result.output
    assert became == [(sys.executable, [sys.executable, *MODULE, *overrides])]


def test_hydras_own_short_flag_for_sweeps_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "-m", "optimizer=adamw,muon"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: -m takes a model preset or path, got 'optimizer=adamw,muon'; "
        "for a sweep write --multirun optimizer=adamw,muon\n"
    )


ORDERS = [
    ["model=tiny", "--multirun", "seed=0,1"],
    ["seed=0", "--cfg", "job", "model=tiny"],
    ["--cfg=job", "seed=0", "--resolve"],
    ["seed=0", "--config-name", "seed=0", "--config-dir", "x"],
]


@pytest.mark.parametrize("typed", ORDERS, ids=" ".join)
def test_flags_may_stand_anywhere_among_the_options(typed):
    line = CommandLine.parse(typed, TrainConfig)
    assert CommandLine.parse(line.words(), TrainConfig) == line
    get_args_parser().parse_args(line.words())  # Hydra's own call, which refuses what is left over


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_hydra_reads_back_the_quoted_text(text):
    (override,) = OverridesParser.create().parse_overrides([f"data.train={quoted(text)}"])
    assert str(override.value()) == text or float(text) == override.value()


@pytest.mark.parametrize("text", ["null", "True", "nan", "a,b", "[a]", "${x}", "back\\", "it's", "a\\'b"])
def test_words_of_hydras_grammar_stay_text(text):
    (override,) = OverridesParser.create().parse_overrides([f"data.train={quoted(text)}"])
    assert override.value() == text


def test_become_replaces_the_process_and_keeps_its_exit_code():
    code = "from rm_optimizer.interfaces.launch import become; become('rm_optimizer.train', ['optimizer=moun'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown optimizer 'moun'; did you mean 'muon'?")


def test_a_module_of_the_users_folder_is_not_taken_for_a_library(tmp_path):
    (tmp_path / "enum.py").write_text("raise SystemExit('the wrong enum')\n")
    code = "from rm_optimizer.interfaces.launch import become; become('rm_optimizer.train', ['optimizer=moun'])"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("error: unknown optimizer 'moun'")


def test_where_execv_returns_early_the_child_is_waited_for(monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    with pytest.raises(SystemExit) as stopped:
        become("rm_optimizer.train", [])
    assert stopped.value.code == 3


@pytest.mark.skipif(os.name == "nt", reason="no execv that keeps signals")
@pytest.mark.parametrize(
    "code",
    [
        "launch.os.execv = lambda *line, real=os.execv: (os.kill(os.getpid(), signal.SIGINT), real(*line))\n"
        "launch.become('rm_optimizer.train', ['--help'])",
        "sys.modules['rm_optimizer.interfaces.cli'] = Interrupting('')\nentry.main()",
    ],
    ids=["the program that replaces it starts", "the commands are imported"],
)
def test_ctrl_c_is_one_sentence_also_while(code):
    start = (
        "import os, signal, sys, types\nfrom rm_optimizer.interfaces import entry, launch\n"
        "class Interrupting(types.ModuleType):\n    def __getattr__(self, name): signal.raise_signal(signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped\n")
