"""Losses over pairs with their derivatives written out, by double backward through plain transformers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from tests.builders import fresh_reward_model

LOSSES = {
    "plain": {"beta": 1.0, "label_smoothing": 0.0, "margin_scale": 0.0, "center_rewards": 0.0, "reward_l2": 0.0},
    "every term": {"beta": 1.3, "label_smoothing": 0.1, "margin_scale": 0.6, "center_rewards": 0.05, "reward_l2": 0.1},
}
ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"one {i // 2} two",
        "chosen": f"three {i * 7 % 11} four",
        "rejected": f"five {'six ' * (i % 4)}",
        "weight": weight,
        "margin": 0.1 * i,
        "label": (1.0, 0.8, 0.5, 0.7, 0.3, 1.0, 0.5)[i],
        "source": "web" if i in (1, 2, 5) else "book",
    }
    for i, weight in enumerate([1.0, 2.0, 1.0, 0.5, 1.0, 3.0, 1.0])
]
MODELS = {  # fields, the parameters measured, and the tolerance that float32 norms of plain Llama leave
    "bert": ({"type_vocab_size": 1}, ["*encoder.layer*", "*pooler*", "*classifier*"], 1e-6),
    "llama": ({"num_key_value_heads": 1}, ["*layers*", "*model.norm*", "*score*"], 2e-4),
}
SHAPE = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Dense:
    """A loss over pairs as a function of one vector."""

    terms: dict[str, float]
    model: Any
    rows: list[dict[str, Any]]
    ids: list[list[list[int]]]
    names: list[str]

    @property
    def weight(self) -> np.ndarray:
        """Share of each pair in the loss."""
        weight = np.array([row["weight"] for row in self.rows])
        return weight / weight.sum()

    @property
    def prompt(self) -> np.ndarray:
        """Number of each pair's prompt."""
        return np.unique([row["prompt"] for row in self.rows], return_inverse=True)[1]

    @property
    def point(self) -> Tensor:
        return torch.cat([p.detach().flatten() for name, p in self.model.named_parameters() if name in self.names])

    def of(self, pairs: Sequence[int]) -> Dense:
        """The loss over some of the pairs."""
        return replace(self, rows=[self.rows[i] for i in pairs], ids=[self.ids[i] for i in pairs])

    def at(self, weights: Mapping[str, Tensor]) -> Dense:
        """The loss at other weights."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(weights, strict=False)
        return replace(self, model=model)

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters of a vector by name."""
        own = {name: p for name, p in self.model.named_parameters() if name in self.names}
        split = torch.split(vector, [p.numel() for p in own.values()])
        return {name: part.view_as(p) for (name, p), part in zip(own.items(), split, strict=True)}

    def columns(self, pattern: str) -> np.ndarray:
        """True for each parameter whose name has the pattern."""
        parts = [np.full(p.numel(), pattern in n) for n, p in self.model.named_parameters() if n in self.names]
        return np.concatenate(parts)

    def rewards(self, vector: Tensor) -> Tensor:
        """Rewards, one row a pair."""
        point, found = self.parts(vector), []
        for pair in self.ids:
            sides = [functional_call(self.model, point, kwargs={"input_ids": torch.tensor([s])}) for s in pair]
            found.append(torch.stack([side.logits[0, 0] for side in sides]))
        return torch.stack(found)

    def pair_losses(self, rewards: Tensor) -> Tensor:
        t = self.terms
        y, m = (torch.tensor([row[key] for row in self.rows], dtype=torch.float64) for key in ("label", "margin"))
        c, r = rewards.T
        z = t["beta"] * (c - r - t["margin_scale"] * m)
        p = y + t["label_smoothing"] * (1 - 2 * y)
        own = p * softplus(-z) + (1 - p) * softplus(z)
        return own + t["center_rewards"] * (c + r) ** 2 + t["reward_l2"] * (c**2 + r**2) / 2

    def loss(self, vector: Tensor) -> Tensor:
        return (torch.from_numpy(self.weight) * self.pair_losses(self.rewards(vector))).sum()

    def measured(self, vector: Tensor) -> dict[str, float]:
        """Loss and accuracy with their errors over prompts; a label of 0.5 has no accuracy, and a tie one half."""
        with torch.no_grad():
            rewards = self.rewards(vector)
            losses = self.pair_losses(rewards).numpy()
        y = np.array([row["label"] for row in self.rows])
        right = 0.5 + 0.5 * np.sign((rewards[:, 0] - rewards[:, 1]).numpy() * np.sign(y - 0.5))
        of_loss = linearized(losses, self.weight, self.prompt)
        of_accuracy = linearized(*(each[y != 0.5] for each in (right, self.weight, self.prompt)))
        names = ("loss", "loss_standard_error", "accuracy", "accuracy_standard_error")
        return dict(zip(names, (*of_loss, *of_accuracy), strict=True))

    def hessian(self) -> np.ndarray:
        """Hessian of the loss."""
        vector = self.point.requires_grad_()
        gradient = torch.autograd.grad(self.loss(vector), vector, create_graph=True)[0]
        unit = torch.eye(len(vector), dtype=torch.float64)
        return torch.autograd.grad(gradient, vector, unit, is_grads_batched=True)[0].numpy()


def linearized(values: np.ndarray, weight: np.ndarray, prompt: np.ndarray) -> tuple[float, float]:
    """Weighted mean over pairs with its standard error, from its residuals summed over each prompt."""
    share = weight / weight.sum()
    totals = np.bincount(np.unique(prompt, return_inverse=True)[1], share * (values - share @ values))
    return float(share @ values), math.sqrt(len(totals) / (len(totals) - 1) * (totals**2).sum())


def jackknifed(values: np.ndarray, d: Dense) -> float:
    """Standard error of a weighted mean over pairs, leaving out one prompt at a time."""
    kept = [d.prompt != prompt for prompt in np.unique(d.prompt)]
    left = [np.average(values[keep], weights=d.weight[keep]) for keep in kept]
    return math.sqrt((len(left) - 1) * np.var(left))


def interval(value: float, error: float, count: int, freedom: float = 0.0, bound: float = -math.inf) -> dict[str, Any]:
    """An estimate with Student's interval."""
    half = float(stats.t.ppf(0.975, freedom or count - 1)) * error
    ends = {"low": max(value - half, bound), "high": max(value + half, bound)}
    return {"value": value, "standard_error": error, "num_samples": count, **ends}


def agree(found: dict[str, Any], expected: dict[str, float], **scale: float) -> bool:
    """True if an estimate is the expected one, with Student's interval."""
    numbers = {name: value for name, value in found.items() if name != "kind"}
    return found["kind"] == "student" and numbers == pytest.approx(expected, **scale)


@cache
def folder(family: str, root: Path) -> Path:
    """An exported model, and the pairs in `pairs.jsonl` beside it."""
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    texts = [f"Prompt: {r['prompt']}\n\nResponse: {r['chosen']} {r['rejected']}" for r in ROWS]
    fields = SHAPE | MODELS[family][0] | {"max_position_embeddings": 48}
    model = fresh_reward_model(family, train_tokenizer(texts, 280), max_length=48, fields=fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.4 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(root / family)
    return root / family


@cache
def dense(family: str, loss: str, root: Path) -> Dense:
    return over(ROWS, family, loss, root)


def over(rows: list[dict[str, Any]], family: str, loss: str, root: Path) -> Dense:
    """The loss of an exported model over rows."""
    path = folder(family, root)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").double().eval()
    ids = []
    for row in rows:
        texts = [f"Prompt: {row['prompt']}\n\nResponse: {row[side]}" for side in ("chosen", "rejected")]
        ids.append([[0, *tokenizer(text, add_special_tokens=False).input_ids, 1] for text in texts])
    parts = [pattern.strip("*") for pattern in MODELS[family][1]]
    names = [name for name, _ in model.named_parameters() if any(part in f"model.{name}" for part in parts)]
    return Dense(LOSSES[loss], model, rows, ids, names)


@cache
def matrices(family: str, loss: str, root: Path) -> dict[str, np.ndarray]:
    """Gradient, and each pair's Gauss-Newton and Fisher matrix with their weighted means over pairs."""
    return matrices_of(dense(family, loss, root))


def matrices_of(d: Dense) -> dict[str, np.ndarray]:
    vector = d.point.requires_grad_()
    rewards = d.rewards(vector)
    rows = torch.stack([torch.autograd.grad(each, vector, retain_graph=True)[0] for each in rewards.flatten()])
    rows = rows.view(len(d.rows), 2, -1)
    slope, block = of_outputs(d, rewards)
    slopes = torch.einsum("pa,pai->pi", slope, rows)
    newton, w = torch.einsum("pai,pab,pbj->pij", rows, block, rows), torch.from_numpy(d.weight)
    found = {"gradient": w @ slopes, "pair newton": newton, "pair fisher": torch.einsum("pi,pj->pij", slopes, slopes)}
    found |= {"gauss_newton": torch.einsum("p,pij->ij", w, newton)}
    found |= {"fisher": torch.einsum("p,pi,pj->ij", w, slopes, slopes)}
    return {name: value.detach().numpy() for name, value in found.items()}


@cache
def hessians(family: str, loss: str, root: Path) -> np.ndarray:
    """Hessian of each pair's loss."""
    return hessians_of(dense(family, loss, root))


def hessians_of(d: Dense) -> np.ndarray:
    vector = d.point.requires_grad_()
    rewards, seconds = d.rewards(vector), []
    slope = of_outputs(d, rewards)[0]
    unit = torch.eye(len(vector), dtype=torch.float64)
    for pair, sides in zip(rewards, slope, strict=True):  # the rewards' own curvature, weighted by the loss's slope
        gradient = torch.autograd.grad(pair @ sides, vector, create_graph=True)[0]
        seconds.append(torch.autograd.grad(gradient, vector, unit, retain_graph=True, is_grads_batched=True)[0])
    return matrices_of(d)["pair newton"] + torch.stack(seconds).numpy()


def of_outputs(d: Dense, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and second derivative of each pair's loss by its two rewards."""
    at = rewards.detach().requires_grad_()
    slope = torch.autograd.grad(d.pair_losses(at).sum(), at, create_graph=True)[0]
    block = [torch.autograd.grad(slope[:, k].sum(), at, retain_graph=True)[0] for k in (0, 1)]
    return slope.detach(), torch.stack(block, dim=1)


def hessian(family: str, loss: str, root: Path) -> np.ndarray:
    return np.einsum("p,pij->ij", dense(family, loss, root).weight, hessians(family, loss, root))
