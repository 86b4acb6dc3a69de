"""Presets that bring others train, and a toy on a user's own pairs is called one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rm_optimizer.core.data_loader import load_training_data
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.reporting.run_report import print_run
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.preparation import build_model

Build = Callable[..., TrainConfig]
FEW = ("training.max_steps=3", "training.eval_at_start=false", "data.synthetic.num_val=16")


@pytest.mark.parametrize(
    "presets", [("optimizer=schedulefree",), ("adapter=lora", "optimizer=muon"), ("optimizer=sgd", "adapter=lora")]
)
def test_presets_that_bring_others_train(presets: tuple[str, ...], small_config: Build, tmp_path: Path):
    result = train_reward_model(small_config(tmp_path, *FEW, *presets))
    losses = [row["train_loss"] for row in read_rows(tmp_path / "metrics.csv")]
    assert (result.steps, len([loss for loss in losses if loss])) == (3, 3)


def test_gradient_checkpointing_reaches_a_model_that_is_built(small_config: Build, tmp_path: Path):
    config = small_config(tmp_path, "model.gradient_checkpointing=true")
    model = build_model(config.model, load_training_data(config.data).train, config.seed)
    assert model.model.is_gradient_checkpointing


def test_a_toy_on_a_users_own_pairs_is_called_one(
    small_config: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pairs = load_training_data(small_config(tmp_path).data).train.pairs[:40]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in pairs))
    config = small_config(tmp_path / "run", f"data.train={file}", "data.val_fraction=0.3", "training.max_steps=1")
    with caplog.at_level(logging.WARNING, logger="rm_optimizer"):
        result = train_reward_model(config)
    console = Console(record=True, width=200)
    print_run(result, console)
    for text in (caplog.text, console.export_text()):
        assert "model=tiny starts from random weights" in text
