"""What every family of text classifiers keeps as a reward model: one contract for the tests and the benchmark."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.head import parts_beside_text
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.optim import build_optimizer
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.composition import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.optimizers import OptimizerConfig
from tests.zoo.families import architecture

PROMPTS = ["Name a colour.", "Name a color.", "How do I boil an egg in a pot of water?", "Hi"]
RESPONSES = ["Blue.", "The color of the sky at noon.", "Seven minutes, then into cold water.", "Hello."]
TOLERANCE = 2e-4
"""Largest difference of two rewards, relative to the largest of the batch: float32 in another order of summation."""
STD = 0.2
"""Standard deviation of the weights, so that nothing a layer does is too small to be seen."""


@dataclass
class Outcome:
    """What was found of a family.

    Args:
        family: its `model_type`.
        refusal: why it is no reward model here, in the product's own words; empty for one that is.
        refused: why an optimizer or an adapter refuses it, by name.
        trained: optimizers and adapters that trained it.
        failures: promises that it broke.
        depends_on_batch: True if a reward changed with what was scored beside it, without a refusal.
    """

    family: str
    refusal: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    depends_on_batch: bool = False


def examine(family: str, folder: Path) -> Outcome:
    """Build a family tiny and hold it to the contract.

    Args:
        family: its `model_type`.
        folder: an empty or missing one, for the export.
    """
    outcome = Outcome(family)
    try:
        model = scrambled(BradleyTerryRM.from_config(architecture(family), tokenizer(), max_length=64, seed=0))
    except (RMOptimizerError, ImportError) as error:
        outcome.refusal = " ".join(str(error).split())
        return outcome
    rewards = _padded(model)
    outcome.depends_on_batch = not _alike(_alone(model), rewards)
    outcome.failures += _broken_promises(model, rewards, folder)
    for name, trained in (("adamw", model), ("muon", model), ("lora", model)):
        _train(copy.deepcopy(trained), name, outcome)
    return outcome


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One small tokenizer for all families."""
    return train_tokenizer([*PROMPTS, *RESPONSES] * 3, 300)


def scrambled(model: BradleyTerryRM) -> BradleyTerryRM:
    """Give every matrix weights that are not small."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD)
    return model.eval()


def _broken_promises(model: BradleyTerryRM, rewards: Tensor, folder: Path) -> Iterator[str]:
    if not rewards.isfinite().all():
        yield "rewards are not finite"
    if not _alike(_padded(model, width=7), rewards):
        yield "padding changes rewards"
    if not _alike(model.score(PROMPTS, RESPONSES), rewards):
        yield "shared prompts change rewards"
    if model.supports_prefix_sharing() is None:
        pair = [np.array(ids, dtype=np.int32) for ids in _ids(model)[:2]]
        if not model.prefix_parity([pair]) <= TOLERANCE * _size(rewards):
            yield "packing changes rewards"
    try:
        model.save_pretrained(folder)
    except RMOptimizerError as error:
        yield f"export: {error}"
        return
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        reloaded = [plain(input_ids=torch.tensor([ids])).logits.squeeze() for ids in _ids(model)]
    if not _alike(torch.stack(reloaded), rewards):
        yield "plain transformers gives other rewards"


def _train(model: BradleyTerryRM, name: str, outcome: Outcome) -> None:
    """One step of an optimizer on every weight, or of AdamW on LoRA factors."""
    try:
        if name == "lora":
            add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0), seed=0)
        optimizer = build_optimizer(
            model, preset("adamw" if name == "lora" else name), head_names=model.head_parameter_names()
        )
    except ConfigError as error:
        outcome.refused[name] = str(error)
        return
    batch = model.train().tokenize(PROMPTS[:2], RESPONSES[:2])
    first, second = model(**batch)
    loss = torch.nn.functional.softplus(second - first)
    loss.backward()
    outcome.failures += _broken_by_training(model, name)
    optimizer.step()
    if math.isfinite(float(loss)) and bool(_padded(model.eval()).isfinite().all()):
        outcome.trained.append(name)
    else:
        outcome.failures.append(f"{name}: a step leaves no finite rewards")


def _broken_by_training(model: BradleyTerryRM, name: str) -> Iterator[str]:
    beside = parts_beside_text(model.model)
    for key, parameter in model.model.named_parameters():
        if parameter.requires_grad and any(key.startswith(f"{part}.") for part in beside):
            yield f"{name}: trains {key}, which reads no text"
        if "lora_" in key and parameter.grad is None:
            yield f"{name}: {key} gets no gradient"
    if all(parameter.grad is None for parameter in model.model.base_model.parameters()):
        yield f"{name}: no gradient reaches the backbone"


@cache
def preset(name: str) -> OptimizerConfig:
    """An optimizer's preset."""
    return typed(compose([f"optimizer={name}", "output_dir=unused"]), TrainConfig).optimizer


def _ids(model: BradleyTerryRM) -> list[list[int]]:
    batch = model.tokenize(PROMPTS, RESPONSES)
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@torch.no_grad()
def _padded(model: BradleyTerryRM, width: int = 0) -> Tensor:
    """Rewards of the batch, padded further by some tokens."""
    batch = model.tokenize(PROMPTS, RESPONSES)
    ids = torch.nn.functional.pad(batch["input_ids"], (0, width), value=model.pad_choice.token_id)
    rewards: Tensor = model(ids, torch.nn.functional.pad(batch["attention_mask"], (0, width)))
    return rewards


@torch.no_grad()
def _alone(model: BradleyTerryRM) -> Tensor:
    single = [model(**model.tokenize([p], [r])) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return torch.cat(single)


def _size(rewards: Tensor) -> float:
    return max(1.0, float(rewards.abs().max()))


def _alike(first: Tensor, second: Tensor) -> bool:
    return float((first - second).abs().max()) <= TOLERANCE * _size(second)
