"""Options of other libraries are answered with ours, from one table that is right about both sides."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from trl import ModelConfig, RewardConfig, ScriptArguments

from rm_optimizer import train_reward_model
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import CommandLine, checked
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.composition import config_root
from rm_optimizer.schema.diagnose import counterpart, counterparts
from tools.describe import optimizer_reference, option_reference

OLD = {"warmup_ratio", "logging_dir"}
"""Names of TRL that the installed version has dropped, and users still type."""


def test_the_names_of_the_table_exist():
    options = option_reference() + optimizer_reference()
    presets = {folder.name for folder in Path(config_root()).iterdir() if folder.is_dir()}
    ours = {row["ours"] for row in counterparts()}
    assert {name for name in ours if f"| `{name}` |" not in options} <= presets
    known = {each.name for kind in (RewardConfig, ModelConfig, ScriptArguments) for each in fields(kind)} | OLD
    assert {name for row in counterparts() for name in row["TRL"].split()} <= known


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_train_epochs=3", "training.epochs"),
        ("per_device_train_batch_size=8", "batching.batch_size"),
        ("learning_rate=1e-5", "optimizer.lr"),
        ("optimizer.learning_rate=1e-5", "optimizer.lr"),
        ("center_rewards_coefficient=0.01", "loss.center_rewards"),
        ("report_to=wandb", "logger"),
        ("cutoff_len=512", "model.max_length"),
        ("zero_stage=3", "hardware.strategy"),
        ("train.max_epochs=2", "training.epochs"),
        ("train.batch_size=8", "batching.batch_size"),
        ("ckpt.max_num=3", "training.keep_checkpoints"),
        ("disable_gradient_checkpointing=true", "model.gradient_checkpointing"),
    ],
)
def test_an_option_of_theirs_is_answered_with_ours(theirs, ours):
    name = theirs.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; for .* set {ours} \("):
        checked([theirs], TrainConfig, writable=False)


def test_a_flag_of_theirs_is_answered_with_our_option():
    for flag in ("num_train_epochs", "train.max_epochs"):
        with pytest.raises(ConfigError, match=rf"unknown flag '--{flag}'; .* set training.epochs .* dashes"):
            CommandLine.parse([f"--{flag}", "3"], TrainConfig)


def test_an_argument_of_theirs_is_answered_with_our_option():
    said = "unknown argument of train_reward_model 'num_train_epochs'; for .* set training.epochs .*; any option"
    with pytest.raises(TypeError, match=said):
        train_reward_model("tiny", num_train_epochs=3)  # type: ignore[arg-type]


def test_an_unknown_name_has_no_counterpart():
    assert counterpart("nonsense") is None
