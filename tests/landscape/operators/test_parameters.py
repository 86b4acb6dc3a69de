"""Subsets of parameters mean the same alone and in a list, and a slip of the pen gets the nearest name."""

from __future__ import annotations

import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.parameters import select_parameters
from tests.landscape.worlds import tiny_measured_loss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_measured_loss(tmp_path_factory.mktemp("tokens")).model


def test_names_and_patterns_join_in_a_list(model):
    head, layer = (select_parameters(model, which).names for which in ("head", "*.layers.0.*"))
    both = select_parameters(model, ["head", "*.layers.0.*"]).names
    assert set(both) == {*head, *layer}
    assert both == select_parameters(model, ["*.layers.0.*", "head", "head"]).names
    assert select_parameters(model, ["trainable", "head"]) == select_parameters(model)


@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        ("haed", "did you mean 'head'"),
        (["haed", "*.layers.0.*"], "params='haed' matches no parameter; did you mean 'head'"),
        (["head", "lora"], "params=lora needs a model with a LoRA adapter"),
        ("trainabel", "did you mean 'trainable'"),
        (["*.nowhere", "*.nobody"], r"params='\*.nowhere, \*.nobody' matches no parameter"),
    ],
    ids=str,
)
def test_a_name_that_is_none_is_refused(model, which, sentence):
    with pytest.raises(ConfigError, match=sentence):
        select_parameters(model, which)


def test_a_pattern_of_a_list_that_selects_nothing_is_named(model, caplog):
    assert select_parameters(model, ["head", "*nothing*"]) == select_parameters(model, "head")
    assert "the pattern '*nothing*' matches no parameter" in caplog.text
