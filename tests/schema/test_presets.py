"""Every combination of presets composes to numbers that belong together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.schema import TrainConfig, config_root
from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, OptimizerConfig, ScheduleName

MODELS = sorted(file.stem for file in Path(config_root(), "model").glob("*.yaml"))
ADAPTERS = ["none", "lora"]
OWN_RATES = {"prodigy": 1.0}
"""Rates that no model changes."""
RATIOS = {"muon": (3, 1), "sgd": (160, 1000), "lion": (0.2, 0.2), "schedulefree": (3, 3), "adamw": (1, 1)}


def options(*overrides: str) -> TrainConfig:
    return checked([*overrides, "output_dir=unused"], TrainConfig, writable=False)


@cache
def composed(choice: str) -> DictConfig:
    named = ["model.path=org/model"] if choice == "model=custom" else []
    return compose([choice, *named, "output_dir=unused"])


def combined(optimizer: str, adapter: str, model: str) -> Any:
    """What these presets compose to; groups meet in interpolations alone, so each is composed once."""
    parts = {
        "optimizer": composed(f"optimizer={optimizer}").optimizer,
        "adapter": composed(f"adapter={adapter}").adapter,
        "model": composed(f"model={model}").model,
    }
    return OmegaConf.to_object(OmegaConf.create(parts))


@pytest.mark.parametrize("optimizer", OPTIMIZER_OPTIONS)
def test_each_optimizer_takes_the_rate_of_each_model_and_adapter(optimizer: str):
    for model in MODELS:
        ratios = []
        for adapter in ADAPTERS:
            parts = combined(optimizer, adapter, model)
            config: OptimizerConfig = parts["optimizer"]
            base = parts["model"].lora_lr if adapter == "lora" else parts["model"].adamw_lr
            ratios.append(config.lr if optimizer in OWN_RATES else config.lr / base)
            assert (config.weight_decay == 0.0) >= (adapter == "lora")
        assert tuple(ratios) == pytest.approx(RATIOS.get(optimizer, (ratios[0], ratios[0])))


@pytest.mark.parametrize(
    "groups", [("model=qwen", "optimizer=muon", "adapter=lora"), ("adapter=lora", "model=qwen", "optimizer=muon")]
)
def test_the_order_of_groups_does_not_matter(groups: tuple[str, ...]):
    config = options(*groups).optimizer
    assert (config.lr, config.adamw_lr, config.weight_decay) == (1e-4, 1e-4, 0.0)  # type: ignore[attr-defined]


def test_an_adapter_without_a_preset_brings_loras_rate_too():
    lora = ("adapter.kind=lora", "adapter.rank=2", "adapter.alpha=4", "adapter.dropout=0")
    assert options("model=llama", *lora).optimizer.lr == 1e-4


def test_explicit_numbers_win_over_the_adapters():
    config = options("model=qwen", "adapter=lora", "optimizer.lr=3e-4", "optimizer.weight_decay=0.1").optimizer
    assert (config.lr, config.weight_decay) == (3e-4, 0.1)
    assert options("model=qwen", "adapter=lora", "model.lora_lr=5e-4").optimizer.lr == 5e-4


@pytest.mark.parametrize("compose_with", [options, lambda *given: typed(compose(given), TrainConfig)])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("adapter=lora", "model.adamw_lr=1e-4"), r"model\.adamw_lr is not read with adapter=lora; set model\.lora_lr"),
        (("model.lora_lr=1e-4",), r"model\.lora_lr is not read with adapter=none; set model\.adamw_lr"),
        (("model=tiny", "model.path=a/b"), r"model=tiny builds its own model.*got 'a/b'; take model=custom"),
        (("model=custom",), r"model\.path must be set"),
        (("adapter=qlora", "model=tiny"), "adapter=qlora stores pretrained weights.* model=tiny starts from random"),
        (("adapter.rank=8",), r"adapter\.rank must be null without an adapter .add adapter=lora., got 8"),
    ],
)
def test_options_that_nothing_would_read_are_refused(compose_with: Any, given: tuple[str, ...], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        compose_with(*given, "output_dir=unused")


@pytest.mark.parametrize("given", [("model.path=org/model",), ("experiment=quickstart", "model.path=org/model")])
def test_a_model_named_by_its_path_takes_no_number_of_the_toy(given: tuple[str, ...]):
    model, toy = options(*given).model, options("model=tiny").model
    assert (model.name, model.path, model.max_length) == ("org/model", "org/model", None)
    assert model.adamw_lr < toy.adamw_lr / 10
    assert not model.architecture


def test_a_path_keeps_the_preset_that_is_chosen_beside_it():
    model = options("model=qwen", "model.path=/data/qwen").model
    assert (model.name, model.path, model.max_length) == ("qwen", "/data/qwen", 1024)


def test_schedulefree_brings_its_schedule_unless_another_is_chosen():
    assert options("optimizer=schedulefree").schedule.name is ScheduleName.constant
    for other in ("schedule=wsd", "experiment=ablation_a2"):
        assert options("optimizer=schedulefree", other).schedule.name is not ScheduleName.constant
    assert options("optimizer=muon").schedule.name is ScheduleName.cosine
