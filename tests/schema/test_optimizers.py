"""Options of optimizers and schedules: presets own the numbers, dataclasses the ranges."""

from __future__ import annotations

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields

import pytest
from omegaconf import MISSING, OmegaConf

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.schedules import lr_factor
from rm_optimizer.schema.checks import require_in
from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, OptimizerConfig, ScheduleConfig, ScheduleName

NEUTRAL = {"name", "head_lr_factor", "layer_lr_decay", "nesterov", "paged", "scaling", "adaptive"}


def optimizer_with(*overrides):
    return typed(compose([*overrides, "output_dir=unused"]), TrainConfig).optimizer


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_every_preset_composes_to_its_dataclass(name):
    assert type(optimizer_with(f"optimizer={name}")) is OPTIMIZER_OPTIONS[name]


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_no_dataclass_holds_a_tuned_number(name):
    tuned = {f.name for f in fields(OPTIMIZER_OPTIONS[name]) if f.default not in (MISSING, NO_DEFAULT)}
    assert tuned <= NEUTRAL


@pytest.mark.parametrize("name", sorted(set(OPTIMIZER_OPTIONS) - {"prodigy"}))
def test_the_learning_rate_follows_the_model(name):
    one, other = (optimizer_with(f"optimizer={name}", f"model.adamw_lr={lr}").lr for lr in (1e-4, 2e-4))
    assert other == pytest.approx(2 * one)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_every_schedule_preset_composes(name):
    schedule = typed(compose([f"schedule={name}", "output_dir=unused"]), TrainConfig).schedule
    assert schedule.name is name


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimizer.lr=0"], r"optimizer.lr must be positive, got 0"),
        (["optimizer.lr=nan"], r"optimizer.lr must be a finite number, got nan"),
        (["optimizer.weight_decay=-1"], r"optimizer.weight_decay must be at least 0, got -1"),
        (["optimizer.beta1=1"], r"optimizer.beta1 must lie in \[0, 1\), got 1"),
        (["optimizer.layer_lr_decay=1.1"], r"optimizer.layer_lr_decay must lie in \(0, 1\], got 1.1"),
        (["optimizer=sgd", "optimizer.momentum=1.5"], r"optimizer.momentum must lie in \[0, 1\), got 1.5"),
        (
            ["optimizer=sgd", "optimizer.momentum=0"],
            r"momentum with optimizer.nesterov=true must lie in \(0, 1\), got 0",
        ),
        (["optimizer=muon", "optimizer.ns_steps=0"], r"optimizer.ns_steps must lie in \[1, 99\], got 0"),
        (["optimizer=sam", "optimizer.rho=0"], r"optimizer.rho must be positive, got 0"),
        (["optimizer=prodigy", "optimizer.head_lr_factor=2"], r"head_lr_factor must be 1 with prodigy, .*, got 2"),
    ],
)
def test_values_out_of_range_are_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        optimizer_with(*overrides)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio must lie in"),
        ({"decay_ratio": 0.2}, "decay_ratio must be null with schedule.name=cosine, got 0.2"),
        ({"name": ScheduleName.wsd}, "decay_ratio must be set with schedule.name=wsd, got null"),
        ({"name": ScheduleName.constant, "min_lr_ratio": 0.1}, "min_lr_ratio must be 0 with schedule.name=constant"),
    ],
)
def test_conflicting_schedule_options_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ScheduleConfig(**({"name": ScheduleName.cosine} | options))


def test_missing_values_and_interpolations_are_not_checked():
    OptimizerConfig()
    OptimizerConfig(lr="${model.adamw_lr}")
    ScheduleConfig()
    assert OmegaConf.is_missing(OmegaConf.structured(OptimizerConfig), "lr")


@pytest.mark.parametrize(
    ("interval", "inside", "outside"), [("[0, 1)", 0, 1), ("(0, 1]", 1, 0), ("[0, inf)", 1e9, -1), ("(0, 1)", 0.5, 0)]
)
def test_brackets_say_whether_the_end_belongs(interval, inside, outside):
    require_in("option", inside, interval)
    with pytest.raises(ConfigError):
        require_in("option", outside, interval)


def test_a_presets_ratio_of_warm_up_gives_way_to_steps_and_an_option_set_to_nothing_is_no_mistake():
    for extra in ([], ["schedule.warmup_ratio=0"], ["logger.name=null", "data.curriculum_quantiles=false"]):
        overrides = ["schedule.warmup_steps=10", *extra, "output_dir=unused"]
        factor = lr_factor(typed(compose(overrides), TrainConfig).schedule, 100)
        assert [factor(0), factor(9) < 1, factor(10)] == [1 / 11, True, 1]
