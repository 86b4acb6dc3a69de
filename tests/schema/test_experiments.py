"""Every experiment composes for a small and a large model and changes exactly what it says."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from rm_optimizer.interfaces.command_line import CommandLine, checked
from rm_optimizer.schema import TrainConfig, config_root
from rm_optimizer.schema.composition import register

NAMES = sorted(file.stem for file in Path(config_root(), "experiment").glob("*.yaml"))
SWEEPS = [name for name in NAMES if name.startswith("sensitivity_")]
CELLS = [pytest.param(name, marks=pytest.mark.slow if name == "sensitivity_grid" else ()) for name in SWEEPS]
MODELS = ["minilm", "qwen"]
STEPS = {
    ("ablation_a1", "ablation_a2"): {"schedule.name", "schedule.warmup_ratio"},
    ("ablation_a2", "ablation_a3"): {"loss.label_smoothing"},
    ("ablation_a3", "ablation_a4"): {"training.early_stopping.enabled", "training.early_stopping.patience"},
    ("ablation_a4", "ablation_a5"): {"loss.center_rewards"},
    ("full_finetune", "lora_r8"): {
        "optimizer.lr",
        "adapter.kind",
        "adapter.rank",
        "adapter.alpha",
        "adapter.dropout",
    },
    ("lora_r8", "lora_r16"): {"adapter.rank", "adapter.alpha"},
}
"""Options in which an experiment differs from the one before it."""


def options(*overrides: str) -> dict[str, Any]:
    config = dataclasses.asdict(checked(overrides, TrainConfig, writable=False, sweeps=True))
    return {name: value for name, value in flat(config) if name != "output_dir"}


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    parts = [
        flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
        for name, value in values.items()
    ]
    return list(itertools.chain(*parts))


def sweep(name: str, *overrides: str) -> list[list[str]]:
    register()
    with initialize_config_dir(config_root(), version_base="1.3"):
        config = compose("config", [f"experiment={name}", *overrides], return_hydra_config=True)
        params = {option: values.split(",") for option, values in config.hydra.sweeper.params.items()}
    return [
        [f"{option}={value}" for option, value in zip(params, values, strict=True)]
        for values in itertools.product(*params.values())
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_keeps_the_model_and_hardware_of_the_command_line(name, model):
    overrides = [f"experiment={name}", f"model={model}", "hardware=h100"]
    config = checked(overrides, TrainConfig, writable=False, sweeps=True)
    assert (config.model.name, config.hardware.precision) == (model, "bf16-mixed")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", STEPS, ids="-".join)
def test_neighbors_differ_in_exactly_what_they_claim(step, model):
    before, after = (options(f"experiment={name}", f"model={model}") for name in step)
    assert {name for name in before | after if before.get(name) != after.get(name)} == STEPS[step]


def test_the_ablation_starts_from_nothing_and_ends_with_everything():
    first, last = options("experiment=ablation_a1"), options("experiment=ablation_a5")
    assert (first["schedule.name"], first["schedule.warmup_ratio"], first["loss.label_smoothing"]) == ("constant", 0, 0)
    assert not first["training.early_stopping.enabled"]
    assert (last["schedule.name"], last["schedule.warmup_ratio"], last["loss.label_smoothing"]) == ("cosine", 0.03, 0.1)
    assert last["training.early_stopping.enabled"]
    assert first["training.epochs"] == last["training.epochs"] == 3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["lora_r8", "lora_r16"])
def test_lora_takes_its_own_learning_rate_and_no_decay(name, model):
    config = options(f"experiment={name}", f"model={model}")
    assert config["optimizer.lr"] == config["model.lora_lr"]
    assert config["optimizer.weight_decay"] == 0
    assert config["adapter.alpha"] == 2 * config["adapter.rank"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_of_a_sweep_composes_and_is_another_configuration(name, model):
    base = [f"experiment={name}", f"model={model}"]
    cells = [options(*base, *cell) for cell in sweep(name, f"model={model}")]
    assert len({str(cell) for cell in cells}) == len(cells) >= 5


@pytest.mark.parametrize("model", MODELS)
def test_the_learning_rates_lie_around_the_models_own(model):
    middle = options(f"model={model}")["optimizer.lr"]
    rates = [options(f"model={model}", *cell)["optimizer.lr"] for cell in sweep("sensitivity_lr", f"model={model}")]
    assert [rate / middle for rate in rates] == pytest.approx([0.1, 0.3, 1.0, 3.0, 10.0])


@pytest.mark.parametrize("name", [name for name in SWEEPS if name != "sensitivity_grid"])  # its rates are absolute
def test_a_sweep_holds_the_value_that_is_used_without_it(name):
    usual = options("model=minilm")
    assert any(
        all(usual[option] == pytest.approx(float(value)) for option, value in (item.split("=") for item in cell))
        for cell in sweep(name, "model=minilm")
    )


def test_the_absolute_grid_has_the_documents_values_and_a_fixed_axis_makes_it_smaller():
    cells = sweep("sensitivity_grid")
    first, last = dict(item.split("=") for item in cells[0]), dict(item.split("=") for item in cells[-1])
    assert (len(cells), first["optimizer.lr"], last["optimizer.lr"]) == (81, "1e-6", "1e-5")
    found = options("model=minilm", *cells[-1])
    names = ("loss.label_smoothing", "schedule.warmup_steps", "loss.reward_l2")
    assert [found[name] for name in names] == [0.1, 100, 0.01]
    jobs = CommandLine.parse(
        ["experiment=sensitivity_grid", "loss.label_smoothing=0", "schedule.warmup_steps=0,50"], TrainConfig
    ).sweep.jobs
    assert len(jobs) == 3 * 1 * 2 * 3
