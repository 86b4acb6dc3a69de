"""Every preset of every group composes into dataclasses, and the order of precedence is the written one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import CommandLine, checked
from rm_optimizer.schema import TrainConfig, compose, config_root, typed
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS

ROOT = Path(config_root())
FILES = [file.relative_to(ROOT) for file in ROOT.glob("*/**/*.yaml")]
NOT_OF_RUNS = ("landscape", "layout", "rlhf", "suite", "world")
PRESETS = sorted((file.parent.as_posix(), file.stem) for file in FILES if file.parts[0] not in NOT_OF_RUNS)

NEED_A_PATH = ("custom", "qlora")


def composed(*overrides: str) -> TrainConfig:
    return checked(overrides, TrainConfig, writable=False, sweeps=True)


@pytest.mark.parametrize(("group", "name"), PRESETS, ids=[f"{group}={name}" for group, name in PRESETS])
def test_every_preset_composes_and_types(group, name):
    needed = ["model.path=org/model"] if name in NEED_A_PATH else []
    assert isinstance(composed(f"{group}={name}", *needed), TrainConfig)


def test_every_registered_optimizer_has_a_preset_of_its_name():
    assert set(OPTIMIZER_OPTIONS) <= {name for group, name in PRESETS if group == "optimizer"}


@pytest.mark.parametrize("group", ["hardware", "model", "optimizer", "logger", "experiment"])
def test_the_promised_presets_are_there(group):
    promised = {
        "hardware": {"cpu", "auto", "h100"},
        "model": {"tiny", "minilm", "deberta", "modernbert", "qwen", "llama"},
        "optimizer": {"adamw", "adam", "sgd", "muon", "lion"},
        "logger": {"default", "wandb"},
        "experiment": {"quickstart"},
    }
    assert promised[group] <= {name for own, name in PRESETS if own == group}


def test_a_preset_given_twice_is_the_later_one():
    assert composed("optimizer=muon", "optimizer=adamw").optimizer.name == "adamw"


def test_the_command_line_wins_over_an_experiment(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /optimizer: lion\n\nseed: 7\ntraining:\n  epochs: 3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    line = CommandLine.parse(["experiment=mine", "training.epochs=4", "--config-dir", str(tmp_path)], TrainConfig)
    config = line.composed(writable=False).options
    assert (config.seed, config.optimizer.name, config.training.epochs) == (7, "lion", 4.0)


def test_the_run_folder_is_hydras_unless_it_is_set():
    assert composed("hydra.run.dir=here").output_dir == str(Path("here").absolute())
    assert composed("output_dir=there").output_dir == "there"


def test_hardware_h100_asks_for_bfloat16_on_a_gpu():
    hardware = composed("optimizer=muon", "hardware=h100").hardware
    assert (hardware.accelerator, hardware.precision) == ("gpu", "bf16-mixed")


def test_the_jobs_of_a_sweep_have_hydras_numbers_and_few_of_them_hold_every_value():
    plan = CommandLine.parse(
        ["seed=1,2,3", "optimizer=adamw,lion", "model=tiny", "hydra.sweep.dir=s"], TrainConfig
    ).sweep
    assert plan.folder == Path("s")
    assert [job[:2] for job in plan.jobs][:3] == [
        ["seed=1", "optimizer=adamw"],
        ["seed=1", "optimizer=lion"],
        ["seed=2", "optimizer=adamw"],
    ]
    assert (len(plan.jobs), plan.covering) == (6, [0, 1, 2, 4])
    plan = CommandLine.parse(["experiment=sensitivity_smoothing", "model=tiny", "seed=1,2"], TrainConfig).sweep
    assert plan.jobs[1][1:] == ["experiment=sensitivity_smoothing", "model=tiny", "seed=2"]
    assert plan.jobs[0][0] == plan.jobs[1][0] != plan.jobs[2][0]


def test_a_value_of_the_command_line_takes_the_place_of_a_presets_axis():
    given = ["experiment=sensitivity_regularizer", "model=tiny", "loss.center_rewards=0.5,0.6", "seed=3", "seed=4"]
    axes = ["loss.center_rewards=0,0.01,0.1", "optimizer.weight_decay=0,0.01,0.1"]
    hydras = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides([*axes, *given]), None)
    plan = CommandLine.parse(given, TrainConfig).sweep
    assert plan.jobs == hydras[0]
    assert (len(plan.jobs), len(plan.covering)) == (6, 4)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model=tinny"], r"^unknown model 'tinny'; did you mean 'tiny'\?"),
        (["optimizer.lrr=1"], r"^unknown option 'optimizer\.lrr'; did you mean"),
        (["optimizer.lr=fast"], r"^optimizer\.lr must be a number"),
        (["optimizer.lr=-1"], r"^optimizer\.lr must"),
        (["optimizer.lr=-1", "output_dir=x"], r"^optimizer\.lr must"),
        (["seed="], "^seed must be an integer"),
        ([], "^output_dir must be given where Hydra does not choose it; add 'output_dir=FOLDER' to the overrides$"),
        (
            ["data=../pairs.jsonl"],
            r"^data takes the name of a preset, got '\.\./pairs\.jsonl'; .* data\.train=\.\./pairs",
        ),
        (["model=models/llama"], r"^model takes the name of a preset, got .* write model\.path=models/llama$"),
        (["s\u0435ed=1"], r"option names are ASCII, and '\u0435' \(U\+0435\) is not"),
    ],
)
def test_from_python_a_mistake_is_the_same_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        typed(compose(overrides), TrainConfig)
