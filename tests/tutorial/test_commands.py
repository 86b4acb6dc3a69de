"""Commands, defaults and modes that the documents name, exactly as they write them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rm_optimizer import RewardModelTrainingMode
from rm_optimizer.interfaces.cli import app
from rm_optimizer.schema import compose, typed
from rm_optimizer.schema.config import TrainConfig


def test_the_training_command_takes_the_five_short_flags(monkeypatch: pytest.MonkeyPatch):
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append(command))
    typed_words = ["train", "-m", "tiny", "-o", "muon", "-d", "d.parquet", "-e", "5", "-b", "32"]
    assert CliRunner().invoke(app, typed_words).exit_code == 0
    overrides = [
        "model=tiny",
        "optimizer=muon",
        "data.train=d.parquet",
        "training.epochs=5",
        "batching.batch_size=32",
    ]
    assert sorted(became[0][3:]) == sorted(overrides)


def test_hydras_entry_prints_the_configuration_of_an_h100():
    words = ["-m", "rm_optimizer.train", "optimizer=muon", "hardware=h100", "--cfg", "job"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "  name: muon\n" in done.stdout
    assert "  precision: bf16-mixed\n" in done.stdout


def test_clipping_patience_and_temperature_are_those_of_the_documents():
    config = typed(compose("output_dir=x"), TrainConfig)
    assert config.training.gradient_clip_norm == 1.0
    assert (config.training.early_stopping.patience, config.loss.beta) == (5, 1.0)


def test_the_trainers_rate_warm_up_and_decay_are_options():
    given = ["optimizer.lr=5e-6", "schedule.warmup_ratio=0", "schedule.warmup_steps=50", "optimizer.weight_decay=0.05"]
    config = typed(compose([*given, "output_dir=x"]), TrainConfig)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (5e-6, 0.05)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", 50)


def test_the_modes_of_a_publisher_have_the_documents_names():
    assert [RewardModelTrainingMode(name).value for name in ("full", "head_only", "lora")] == [*RewardModelTrainingMode]
