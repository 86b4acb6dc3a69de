"""The balancing loss of experts is the one of transformers, joins the training loss, and is refused without experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForSequenceClassification, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from rm_optimizer.core.classifier.router_loss import RouterBalance
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from tests.builders import tiny_reward_model

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, num_labels=1, pad_token_id=0)
QWEN = Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)


@pytest.fixture
def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (3, 7), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[7], [4], [6]])
    mask = (torch.arange(7) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_it_is_the_loss_of_transformers(tokens: dict[str, Tensor]):
    torch.manual_seed(0)
    whole = Qwen2MoeForCausalLM(QWEN)
    expected = whole(**tokens, output_router_logits=True).aux_loss
    classifier = AutoModelForSequenceClassification.from_config(copy.deepcopy(QWEN))
    classifier.base_model.load_state_dict(whole.base_model.state_dict())
    classifier.config.pad_token_id = 0
    balance = RouterBalance(classifier)
    for _ in range(2):  # a second pass replaces the first
        classifier(**tokens)
        torch.testing.assert_close(balance.loss(tokens["attention_mask"]), expected)


def test_balanced_routers_give_the_experts_of_a_token(tokens: dict[str, Tensor]):
    model = MixtralForSequenceClassification(MIXTRAL)
    balance = RouterBalance(model)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data.zero_()
    model(**tokens)
    assert balance.loss(tokens["attention_mask"]).item() == pytest.approx(2.0)


def test_checkpointed_layers_give_the_same_gradient(tokens: dict[str, Tensor]):
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = MixtralForSequenceClassification(MIXTRAL).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        balance = RouterBalance(model)
        for _ in range(2):
            model.zero_grad()
            rewards = model(**tokens).logits.sum()
            (rewards + balance.loss(tokens["attention_mask"])).backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_a_family_without_experts_is_refused():
    with pytest.raises(ConfigError, match=r"needs a mixture of experts.*LlamaForSequenceClassification is none"):
        RouterBalance(tiny_reward_model("llama").model)


def test_a_run_adds_it_to_the_training_loss(small_config: Callable[..., TrainConfig], tmp_path: Path):
    experts = ["num_local_experts=4", "num_experts_per_tok=1", "num_hidden_layers=1"]
    options = ["model.architecture.model_type=mixtral", *(f"+model.architecture.{each}" for each in experts[:2])]
    options += [f"model.architecture.{experts[2]}", "training.max_steps=6", "optimizer.lr=1e-2"]
    last = {}
    for name, coefficient in (("plain", "null"), ("balanced", "10")):
        run = [*options, f"model.router_aux_loss_coef={coefficient}"]
        train_reward_model(small_config(tmp_path / name, *run))
        last[name] = read_rows(tmp_path / name / "metrics.csv")
    assert "train_router_loss" not in last["plain"][0]
    found = [float(row["train_router_loss"]) for row in last["balanced"] if row["train_router_loss"]]
    assert len(found) == 6
    assert all(value > 0.9 for value in found)  # 1 is balanced, with one expert a token
    assert last["plain"][1]["train_loss"] != last["balanced"][1]["train_loss"]
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef needs a mixture of experts"):
        train_reward_model(small_config(tmp_path / "llama", "model.router_aux_loss_coef=0.01"))
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef must be null with model\.freeze=backbone"):
        small_config(tmp_path / "x", "model.router_aux_loss_coef=0.01", "model.freeze=backbone")


def test_halved_passes_which_balance_other_tokens_are_refused(small_config: Callable[..., TrainConfig], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"on_out_of_memory must be stop with model\.router_aux_loss_coef"):
        small_config(tmp_path / "x", "model.router_aux_loss_coef=0.01", "hardware.on_out_of_memory=halve")
