"""Tiny reward models with pairs, and their loss as a plain function of one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev
from transformers import PreTrainedTokenizerFast

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, PackedPairCollator, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.products import load_forward_rules
from rm_optimizer.schema import LossConfig
from tests.builders import fresh_reward_model, tiny_reward_model

load_forward_rules()  # tests differentiate forwards too
FAMILIES = ("bert", "llama")
PLAIN = LossConfig()
EVERYTHING = LossConfig(beta=1.3, label_smoothing=0.1, margin_scale=0.5, center_rewards=0.05, reward_l2=0.1)
"""A loss with every option on."""
INNER = ("*attention.self.*", "*self_attn*", "*.score.*", "*.classifier.*", "*LayerNorm*", "*norm.*")
"""Patterns of attention, norms and head: few enough parameters to write matrices out."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away", "home")
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 48,
}
FOUR_PROMPTS = [
    PreferencePair(
        prompt=f"one {i // 2} two", chosen=f"three {i * 7 % 11} four", rejected=f"five {'six ' * (i % 4)}", weight=w
    )
    for i, w in enumerate([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0])
]


@cache
def pairs(count: int = 8, seed: int = 0) -> tuple[PreferencePair, ...]:
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    return tuple(
        PreferencePair(
            text(2, 8),
            text(1, 9) + " a",
            text(1, 9) + " b",
            margin=float(rng.uniform(0, 1)),
            label=float(rng.uniform(0.6, 1)),
            weight=1 + index % 3,
        )
        for index in range(count)
    )


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(rendered_texts(pairs()), 280)


def reward_model(
    family: str = "bert", *, seed: int = 0, attention: str = "auto", dropout: bool = False
) -> BradleyTerryRM:
    """About 3,500 parameters; weights large enough for curvature that is not all in the head."""
    fields = SHAPE | ({"type_vocab_size": 1} if family == "bert" else {})
    model = fresh_reward_model(
        family, tokenizer(), max_length=48, seed=seed, fields=fields, attn_implementation=attention, dropout=dropout
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tiny_measured_loss(cache_dir: Path, *, token_budget: int = 64, params: str = "trainable") -> MeasuredLoss:
    """A one-layer decoder in float64 on eight pairs of four prompts, with every term of the loss."""
    model = tiny_reward_model("llama", max_length=32, num_hidden_layers=1).double().eval()
    sample = draw_pairs(model, FOUR_PROMPTS, 8, 0, token_budget=token_budget)
    return MeasuredLoss(model, sample, LossConfig(label_smoothing=0.1, center_rewards=0.01), params, torch.float64)


def micro_batches(
    model: BradleyTerryRM, budget: int = 100_000, *, packed: bool = False, data: Sequence[PreferencePair] | None = None
) -> list[AnyPairBatch]:
    data = pairs() if data is None else data
    tokens = tokenize_pairs(list(data), model.renderer, None)
    collator = (PackedPairCollator if packed else PairCollator)(tokens, list(data), model.renderer.pad_token_id)
    return [collator(batch) for batch in collator.micro_batches(np.arange(len(tokens)), budget)]


def rewards_of_vector(objective: PairObjective, batch: AnyPairBatch, vector: Tensor) -> Tensor:
    return objective.rewards_at(objective.subset.unflatten(vector), batch)


def loss_of_vector(objective: PairObjective) -> Callable[[Tensor], Tensor]:
    """The loss over all pairs as a function of the selected parameters laid end to end."""

    def loss(vector: Tensor) -> Tensor:
        shares = [objective.share(rewards_of_vector(objective, batch, vector), batch) for batch in objective.batches]
        return torch.stack(shares).sum()

    return loss


@dataclass(frozen=True)
class Dense:
    """A model with the matrices of its loss over `INNER` written out."""

    model: BradleyTerryRM
    batches: list[AnyPairBatch]
    hessian: Tensor
    gauss_newton: Tensor
    fisher: Tensor


@cache
def dense(family: str, with_everything: bool = True) -> Dense:
    """By `torch.func`, from the loss and the rewards as functions of one vector.

    The Hessian is the forward derivative of the gradient. `torch.func.hessian` differentiates `jacrev` forwards
    instead, which on the encoder gives a matrix that is not symmetric (torch 2.13). It is of the loss with everything.
    """
    model = reward_model(family)
    batches = micro_batches(model, data=pairs()[:5])
    loss = EVERYTHING if with_everything else PLAIN
    with measuring(model, batches, loss, params=INNER, dtype=torch.float64) as objective:
        (batch,) = objective.batches
        start = objective.subset.flatten(objective.parameters).detach()
        second = jacfwd(grad(loss_of_vector(objective)))(start) if with_everything else torch.empty(0, 0)
        jacobian = jacrev(lambda vector: rewards_of_vector(objective, batch, vector))(start)
        at = rewards_of_vector(objective, batch, start)
        outer = jacrev(jacrev(lambda rewards: objective.share(rewards, batch)))(at)
        slopes = jacrev(lambda rewards: objective.pair_losses(rewards, batch))(at) @ jacobian
        fisher = slopes.T @ (slopes * (batch.weight / batch.weight.sum())[:, None])
    return Dense(model, batches, second, jacobian.T @ outer @ jacobian, fisher)
