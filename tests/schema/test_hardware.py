"""What `hardware=h100` sets, model by model, and that it fits the memory it is made for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import estimate

MODELS = ("tiny", "minilm", "deberta", "modernbert", "qwen", "llama")
PUBLISHED = json.loads(Path(estimate.__file__).with_name("published.json").read_text(encoding="utf-8"))
LAYERS = {"minilm": 6, "deberta": 12, "modernbert": 22, "qwen": 24}
PARAMETERS = {"minilm": 22.7e6, "deberta": 184e6, "modernbert": 149e6, "qwen": 494e6}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)


def composed(*overrides: str) -> TrainConfig:
    return typed(compose(["output_dir=run", *overrides]), TrainConfig)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_brings_its_batch_size_and_on_an_h100_its_tokens(model: str):
    anywhere, there = composed(f"model={model}"), composed(f"model={model}", "hardware=h100")
    for config in (anywhere, there):
        assert config.batching.batch_size == config.model.batch_size
    assert (anywhere.batching.micro_token_budget, anywhere.batching.eval_token_budget) == (8192, 16384)
    assert there.batching.micro_token_budget == there.model.gpu_tokens
    assert there.batching.eval_token_budget >= there.batching.micro_token_budget


def test_what_is_said_on_the_command_line_wins():
    config = composed("hardware=h100", "batching.batch_size=8", "batching.micro_token_budget=99", "data.num_workers=1")
    assert (config.batching.batch_size, config.batching.micro_token_budget) == (8, 99)
    assert (config.data.num_workers, config.hardware.num_workers) == (1, 4)


def test_an_h100_compiles_pins_and_loads_ahead_and_nothing_else_does():
    there = composed("hardware=h100")
    assert (there.hardware.compile, there.hardware.pin_memory, there.data.num_workers) == (True, True, 4)
    for name in ("auto", "cpu", "ddp"):
        here = composed(f"hardware={name}")
        assert (here.hardware.compile, here.hardware.pin_memory, here.data.num_workers) == (False, False, 0)


def kept_bytes(model: str, layers: int, tokens: int) -> int:
    """Bytes that a forward pass under bf16 autocast keeps for the backward pass, weights left out."""
    own = {"vocab_size": 128, "num_labels": 1, "pad_token_id": 0, "num_hidden_layers": layers}
    fields = PUBLISHED[composed(f"model={model}").model.path] | TOKEN_IDS | own
    dropout = NO_DROPOUT if model in ("minilm", "deberta") else {}
    config = AutoConfig.for_model(**fields, **dropout)
    network = AutoModelForSequenceClassification.from_config(config).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    ids = torch.randint(3, 128, (tokens // 256, 256), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(256) < 250).long().expand_as(ids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        network.base_model(input_ids=ids, attention_mask=mask)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("model", LAYERS)
def test_a_pass_on_an_h100_fits_beside_the_state_of_adamw(model: str):
    """Weights, gradients and two moments in float32 and weights in bf16: 18 bytes a parameter; a tenth stays free.

    Bytes of a layer and token are the difference of two depths and two lengths, so that weights cast to bf16 cancel.
    """
    kept = {(depth, rows): kept_bytes(model, depth, 256 * rows) for depth in (1, 2) for rows in (1, 2)}
    per_token = (kept[2, 2] - kept[2, 1] - kept[1, 2] + kept[1, 1]) / 256
    passes = composed(f"model={model}", "hardware=h100").batching.micro_token_budget * LAYERS[model] * per_token
    assert 0 < passes + 18 * PARAMETERS[model] < 0.9 * 80e9
