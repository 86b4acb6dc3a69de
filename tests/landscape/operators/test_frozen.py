"""A measurement leaves a model bit for bit as it found it, whatever state it was in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.landscape.operators.base import HessianOperator, OutputOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.parameters import parameter_blocks, select_parameters
from rm_optimizer.landscape.training_curvature import measure_curvature
from tests.landscape.worlds import PLAIN, SHAPE, micro_batches, reward_model, tokenizer


def state_of(model: BradleyTerryRM) -> dict[str, Any]:
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global generator is what must not move
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "attention": model.model.config._attn_implementation,
        "gradients": [parameter.grad for parameter in model.parameters()],
        "gradient_values": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": numpy_state[1].copy(),
        "python": random.getstate(),
        "identity": [id(parameter) for parameter in model.parameters()],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name
    for key in ("training", "requires_grad", "attention", "python", "identity"):
        assert before[key] == after[key], key
    assert all(first is second for first, second in zip(before["gradients"], after["gradients"], strict=True))
    for first, second in zip(before["gradient_values"], after["gradient_values"], strict=True):
        assert (first is None and second is None) or torch.equal(first, second)
    assert torch.equal(before["torch"], after["torch"])
    assert (before["numpy"] == after["numpy"]).all()


def in_the_middle_of_training(family: str, attention: str) -> BradleyTerryRM:
    model = reward_model(family, attention=attention, dropout=True)
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    next(model.model.base_model.modules()).training = False  # one module that differs from the rest
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    for parameter in parameters[2:]:
        parameter.grad = torch.randn_like(parameter)
    return model


def measure_everything(model: BradleyTerryRM, dtype: torch.dtype) -> None:
    with measuring(model, micro_batches(model), PLAIN, dtype=dtype) as objective:
        for operator in (HessianOperator(objective), OutputOperator(objective, "fisher")):
            operator.apply(torch.ones(1, operator.dimension, dtype=dtype))
        torch.rand(3)
        random.random()
        np.random.rand(2)  # noqa: NPY002


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_everything_is_as_it_was(family: str, attention: str):
    model = in_the_middle_of_training(family, attention)
    before = state_of(model)
    for dtype in (torch.float32, torch.float64):
        measure_everything(model, dtype)
        assert_same(before, state_of(model))
    measure_curvature(model, micro_batches(model), PLAIN)()
    assert_same(before, state_of(model))


def test_everything_is_as_it_was_after_a_failure():
    model = in_the_middle_of_training("bert", "eager")
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt), measuring(model, micro_batches(model), PLAIN):
        raise KeyboardInterrupt
    assert_same(before, state_of(model))


def test_dropout_is_off_while_measuring():
    model = reward_model("bert", dropout=True).train()
    with measuring(model, micro_batches(model), PLAIN) as objective:
        assert torch.equal(objective.gradient(), objective.gradient())


@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode])
def test_it_measures_inside_a_block_without_gradients(enter: Callable[[], Any]):
    model = reward_model("bert")
    batches = micro_batches(model)
    with measuring(model, batches, PLAIN) as objective:
        expected = objective.gradient()
    with enter(), measuring(model, batches, PLAIN) as objective:
        assert torch.equal(objective.gradient(), expected)


def test_bfloat16_weights_are_measured_in_float32():
    model = reward_model("llama").to(torch.bfloat16)
    with measuring(model, micro_batches(model), PLAIN) as objective:
        assert objective.dtype == torch.float32
        product = HessianOperator(objective, product="reverse").apply(torch.ones(1, objective.subset.num_parameters))
    whole = model.to(torch.float32)
    with measuring(whole, micro_batches(model), PLAIN) as objective:
        expected = HessianOperator(objective, product="reverse").apply(torch.ones(1, objective.subset.num_parameters))
    torch.testing.assert_close(product, expected)


def test_attention_fixed_to_a_fused_kernel_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = reward_model("bert")
    kind = type(model.model)
    monkeypatch.setattr(kind, "_can_set_attn_implementation", classmethod(lambda cls: False))
    monkeypatch.setattr(model.model.config, "_attn_implementation_internal", "flash_attention_2")
    with (
        pytest.raises(ConfigError, match="is fixed to flash_attention_2; load it with attn_implementation=eager"),
        measuring(model, micro_batches(model), PLAIN),
    ):
        pass


def test_nothing_to_measure_is_said_in_one_sentence():
    model = reward_model("bert")
    with pytest.raises(DataError, match="at least one pair"), measuring(model, [], PLAIN):
        pass
    with pytest.raises(ConfigError, match="needs a model with a LoRA adapter"):
        select_parameters(model, "lora")
    with pytest.raises(ConfigError, match=r"params='model.bert.encoder.layer.7\*' matches no parameter"):
        select_parameters(model, "model.bert.encoder.layer.7*")
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="has no trainable parameters"):
        select_parameters(model)


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = reward_model("bert")
    monkeypatch.setattr("rm_optimizer.landscape.operators.parameters.DTensor", nn.Parameter)
    assert DTensor is not nn.Parameter
    with pytest.raises(ConfigError, match=r"is sharded over processes \(FSDP\); load the saved model whole"):
        select_parameters(model)


def test_subsets_are_those_named():
    model = reward_model("bert")
    assert select_parameters(model, "head").names == tuple(model.head_parameter_names())
    layer = select_parameters(model, ["*.layer.0.attention.*", "*.classifier.bias"])
    assert len(layer.names) == 11
    blocks = parameter_blocks(model)
    assert list(blocks) == ["embeddings", "layer 1", "output"]
    named = [name for block in blocks.values() for name in block.names]
    assert sorted(named) == sorted(select_parameters(model).names)


def test_vectors_and_parameters_convert_into_each_other():
    model = reward_model("llama")
    subset = select_parameters(model)
    parameters = subset.of(model)
    vector = subset.flatten(parameters)
    assert vector.shape == (subset.num_parameters,)
    for part, parameter in zip(subset.unflatten(vector), parameters, strict=True):
        assert torch.equal(part, parameter)
    assert subset.unflatten(torch.stack([vector, vector]))[0].shape == (2, *subset.shapes[0])


def soft_capped(noise: float, **fields: Any) -> BradleyTerryRM:
    """A Gemma 2 whose attention logits reach the cap."""
    heads = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 1}
    architecture = {"model_type": "gemma2"} | SHAPE | heads | fields
    model = BradleyTerryRM.from_config(architecture, tokenizer(), max_length=48, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_a_soft_cap_of_attention_is_part_of_the_measured_loss(cap: float):
    model = soft_capped(1.0, attn_logit_softcapping=cap)
    batches = micro_batches(model)
    with measuring(model, batches, PLAIN, twice=False) as objective:
        own, slope = objective.value(), objective.gradient()
    with measuring(model, batches, PLAIN) as objective:
        assert objective.value() == pytest.approx(own, rel=1e-6)
        torch.testing.assert_close(objective.gradient(), slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))


def test_attention_that_gives_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rm_optimizer.landscape.operators.objective.soft_cap", lambda config: None)
    model = soft_capped(1.0, attn_logit_softcapping=1.0)
    with (
        pytest.raises(ConfigError, match=r"must be that of the model's own loss, .*load the model with attn_impl"),
        measuring(model, micro_batches(model), PLAIN),
    ):
        pass


@pytest.mark.parametrize("product", ["forward", "reverse", "kept_graph"])
def test_hooks_of_checkpointing_are_off_while_measuring(product: str):
    model = reward_model("llama")
    batches = micro_batches(model)
    with measuring(model, batches, PLAIN) as objective:
        vector = torch.ones(1, objective.subset.num_parameters)
        expected = HessianOperator(objective, product=product).apply(vector)
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hooks = [module._forward_hooks for module in model.modules()]
    assert any(hooks)
    with measuring(model, batches, PLAIN) as objective:
        torch.testing.assert_close(HessianOperator(objective, product=product).apply(vector), expected)
    assert all(now is before for now, before in zip((m._forward_hooks for m in model.modules()), hooks, strict=True))
    model.model.disable_input_require_grads()
    assert not any(hooks)
