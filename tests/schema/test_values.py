"""Every option of every command refuses the numbers that mean nothing for it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.config import BatchingConfig, LossConfig
from rm_optimizer.schema.diagnose import option_names
from rm_optimizer.schema.landscape import AnalyzeConfig, SpectrumOptions
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS

MAY_BE_NEGATIVE = frozenset({"optimizer.beta2_decay"})
"""Options for which -1 means something: an exponent."""


def kinds(config: DictConfig) -> Iterator[tuple[str, set[Any]]]:
    """Options with the types that they take."""
    for option in option_names(config):
        parent, _, leaf = option.rpartition(".")
        owner = OmegaConf.get_type(OmegaConf.select(config, parent) if parent else config)
        hint = get_type_hints(owner)[leaf]
        yield option, set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}


def composed(name: str) -> tuple[DictConfig, type]:
    """The options of `rm-opt analyze`, or of training with an optimizer; with what makes all of them be read."""
    if name == "analyze":
        return compose(["output_dir=x", "checkpoint=x"], "analyze"), AnalyzeConfig
    given = ["adapter=lora", "publish.url=http://127.0.0.1:1", "data.train=x", "schedule=constant"]
    return compose(["output_dir=x", *given, f"optimizer={name}"]), TrainConfig


def refuses(config: DictConfig, kind: type, option: str, value: object) -> bool:
    changed = config.copy()
    with read_write(changed), open_dict(changed):
        OmegaConf.update(changed, option, value)
    try:
        typed(changed, kind)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", ["analyze", *OPTIMIZER_OPTIONS])
def test_a_number_that_means_nothing_is_refused(name):
    config, kind = composed(name)
    numbers = {option: taken for option, taken in kinds(config) if taken & {int, float}}
    of_the_optimizer = {option for option in numbers if option.startswith("optimizer.")}
    accepted = []
    for option in numbers if name in ("analyze", "adamw") else of_the_optimizer:
        meaningless = [float("nan"), float("inf")] if float in numbers[option] else []
        meaningless += [] if option in MAY_BE_NEGATIVE else [-1]
        accepted += [f"{option}={value}" for value in meaningless if not refuses(config, kind, option, value)]
    assert accepted == []
    assert typed(config, kind) is not None


@pytest.mark.parametrize(
    "typed_text", ["model.dropout=2", "training.progress=1", "hardware.compile=0", "model.dropout=0.5"]
)
def test_a_number_is_no_switch(typed_text):
    with pytest.raises(ConfigError, match=r"must be true or false, got '"):
        compose([typed_text])


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (SpectrumOptions, {"num_probes": np.int64(-5)}, "num_probes must be at least 0, got -5"),
        (SpectrumOptions, {"tolerance": np.float32(7)}, "tolerance must lie in (0, 1), got 7.0"),
        (BatchingConfig, {"batch_size": np.int64(0)}, "batching.batch_size must be at least 1, got 0"),
        (LossConfig, {"beta": np.float32("nan")}, "loss.beta must be a finite number, got nan"),
        (LossConfig, {"beta": [1]}, "loss.beta must be a number, got [1]"),
    ],
)
def test_values_from_python_are_checked_whatever_their_type(kind, given, sentence):
    with pytest.raises(ConfigError) as refused:
        kind(**given)
    assert str(refused.value) == sentence
    assert LossConfig(beta=np.float32(0.5)).beta == 0.5


def test_options_without_their_groups_can_be_made():
    assert TrainConfig().seed == 0
