"""A multimodal classifier trains its text model alone."""

from __future__ import annotations

import logging

import pytest

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import build_optimizer, describe_groups
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.config import TrainConfig
from tests.builders import decoder_tokenizer
from tests.zoo.families import architecture

VISION = {"gemma3": ("vision_tower", "multi_modal_projector"), "qwen3_5": ("visual",)}


def multimodal(family: str) -> BradleyTerryRM:
    return BradleyTerryRM.from_config(architecture(family), decoder_tokenizer(), max_length=64, seed=0)


def adapted(model: BradleyTerryRM, targets: list[str] | None = None) -> set[str]:
    """Names of the parameters that get a gradient from one reward."""
    add_adapter(
        model.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0, targets=targets), seed=0
    )
    model(**model.tokenize(["Hi"], ["Hello."])).sum().backward()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize("family", VISION)
def test_vision_is_frozen_and_said(family: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="rm_optimizer"):
        model = multimodal(family)
    for part in VISION[family]:
        assert not any(p.requires_grad for p in model.model.base_model.get_submodule(part).parameters())
        assert f"model.{part} (" in caplog.text
    preset = typed(compose(["optimizer=muon", "output_dir=unused"]), TrainConfig).optimizer
    groups = describe_groups(build_optimizer(model, preset, head_names=model.head_parameter_names()))
    trained = {name for row in groups for name in row.names}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", VISION)
def test_lora_adapts_the_text_alone(family: str):
    assert adapted(multimodal(family)) == set()


def test_lora_targets_that_both_have_are_adapted_in_the_text_alone():
    assert adapted(multimodal("gemma3"), ["q_proj"]) == set()


def test_a_target_in_the_vision_tower_is_refused():
    with pytest.raises(ConfigError, match="got out_proj; known: down_proj, gate_proj, k_proj, o_proj"):
        adapted(multimodal("gemma3"), ["q_proj", "out_proj"])
