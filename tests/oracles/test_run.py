"""Every number of a run from its options and rows alone: metrics.csv, pair_rewards.jsonl and run.json.

Rewards come from plain transformers, one sequence at a time; loss, rates, optimizer and metrics from their formulas.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.special import expit
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.preparation import starting_weights
from tests.builders import tiny_model, tiny_tokenizer

WORDS = ("the", "good", "bad", "egg", "water", "run", "code", "answer", "short", "please", "no", "yes", "never", "blue")
LENGTH, SEED = 48, 5
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options of a run, as this file applies them and as the command line has them."""

    family: str
    optimizer: str
    num_train: int
    num_val: int
    num_prompts: int
    batch: int
    epochs: int
    lr: float
    schedule: str
    warmup: int
    options: tuple[str, ...]
    loss: dict[str, float] = field(default_factory=dict)
    decay: float = 0.0
    head_factor: float = 1.0
    layer_decay: float = 1.0
    min_ratio: float = 0.0
    clip: float | None = None
    rank: int = 0
    alpha: float = 0.0
    num_bootstrap: int = 0


EVERY_TERM = {"beta": 1.4, "label_smoothing": 0.1, "margin_scale": 0.7, "center_rewards": 0.06, "reward_l2": 0.03}
CASES = {
    "decoder": Case(
        **{"family": "llama", "optimizer": "adamw", "num_train": 20, "num_val": 14, "num_prompts": 5, "batch": 6},
        **{"epochs": 2, "lr": 3e-3, "schedule": "cosine", "warmup": 2, "min_ratio": 0.2, "loss": EVERY_TERM},
        **{"decay": 0.2, "head_factor": 1.6, "layer_decay": 0.8, "clip": 2.0, "num_bootstrap": 500},
        options=(
            "batching.micro_token_budget=128",
            "optimizer.beta1=0.8",
            "optimizer.beta2=0.95",
            "optimizer.eps=1e-4",
        ),
    ),
    "encoder": Case(
        **{"family": "bert", "optimizer": "sgd", "num_train": 13, "num_val": 60, "num_prompts": 45, "batch": 5},
        **{"epochs": 1, "lr": 2e-3, "schedule": "linear", "warmup": 1, "loss": {"beta": 0.8}},
        **{"decay": 0.1, "head_factor": 0.5, "layer_decay": 0.9, "clip": 50.0, "num_bootstrap": 4000},
        options=("batching.micro_token_budget=256", "optimizer.momentum=0.7", "optimizer.nesterov=true"),
    ),
    "lora": Case(
        **{"family": "llama", "optimizer": "schedulefree", "num_train": 12, "num_val": 9, "num_prompts": 3, "batch": 4},
        **{"epochs": 2, "lr": 5e-3, "schedule": "constant", "warmup": 3, "decay": 0.1, "rank": 3, "alpha": 12.0},
        **{"num_bootstrap": 100},
        options=("adapter=lora", "adapter.rank=3", "adapter.alpha=12.0", "batching.micro_token_budget=200"),
    ),
}


def rows_of(case: Case, count: int, seed: int) -> list[Row]:
    """Rows with margins, labels, weights, and one pair that is equal after truncation and so a tie."""
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(words))

    prompts = [text(3) for _ in range(case.num_prompts)]
    rows = []
    for i in range(count):
        row: Row = {"prompt": prompts[i % len(prompts)], "chosen": f"a {text(rng.randint(1, 4))}"}
        row |= {"rejected": f"the {text(rng.randint(1, 4))}", "margin": round(rng.random(), 3)}
        rows.append(row | {"label": rng.choice([1.0, 1.0, 0.8, 0.5, 0.3]), "weight": rng.choice([1.0, 2.0, 0.5])})
    rows[2] |= {"chosen": "never " * 30 + "yes", "rejected": "never " * 30 + "no", "label": 1.0}
    rows[5]["chosen"] = "short " * 8  # which cuts the prompt
    return rows


class Plain:
    """A classifier of plain transformers whose rewards are a function of its trained tensors."""

    def __init__(self, case: Case, base: Path, start: dict[str, Tensor]) -> None:
        self.case, self.tokenizer = case, AutoTokenizer.from_pretrained(base)
        self.model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32).eval()
        self.frozen = {name: p.detach() for name, p in self.model.named_parameters()}
        trained = self.frozen
        if case.rank:
            trained = {name: value for name, value in start.items() if ".lora_" in name}
            trained |= {"score.weight": self.frozen["score.weight"]}
        self.trained = {name: value.clone().requires_grad_() for name, value in trained.items()}

    def ids(self, prompt: str, response: str) -> list[int]:
        """Tokens of a conversation: a long one loses the left of its prompt, and then the right of its response."""
        is_encoder = self.case.family == "bert"  # the decoder's tokenizer adds no BOS
        first, last = ([self.tokenizer.cls_token_id], self.tokenizer.sep_token_id) if is_encoder else ([], 1)
        room = LENGTH - len(first) - 1
        before = f"Prompt: {prompt}\n\nResponse: "
        alone, whole = (self.tokenizer(t, add_special_tokens=False).input_ids for t in (before, before + response))
        start = next((i for i, (x, y) in enumerate(zip(alone, whole, strict=False)) if x != y), len(alone))
        kept = whole[min(start, max(0, len(whole) - room)) :]
        return [*first, *kept[:room], last]

    def reward(self, prompt: str, response: str) -> Tensor:
        weights = self.trained
        if self.case.rank:
            weights = dict(self.frozen) | {"score.weight": self.trained["score.weight"]}
            for name in [name for name in self.trained if ".lora_A." in name]:
                b = self.trained[name.replace("lora_A", "lora_B")]
                key = name.replace(".lora_A.default", "")
                weights[key] = weights[key] + self.case.alpha / self.case.rank * b @ self.trained[name]
        ids = torch.tensor([self.ids(prompt, response)])
        logits: Tensor = functional_call(self.model, weights, kwargs={"input_ids": ids}).logits
        return logits[0, 0]

    def rewards(self, rows: list[Row]) -> Tensor:
        return torch.stack([torch.stack([self.reward(r["prompt"], r[side]) for side in SIDES]) for r in rows])

    def scored(self, rows: list[Row]) -> np.ndarray:
        with torch.no_grad():
            return self.rewards(rows).double().numpy()

    def rule_of(self, name: str) -> tuple[float, float]:
        """Factor on the learning rate, and weight decay, of a tensor."""
        case, p = self.case, self.trained[name]
        if name.startswith(("score", "classifier", "bert.pooler.dense.weight")):
            return case.head_factor, case.decay * ("pooler" in name)
        layer = re.search(r"layers?\.(\d)\.", name)
        below = 2 - int(layer[1]) if layer else 3 if "embed" in name else 0
        is_decayed = p.ndim == 2 and layer is not None
        return case.layer_decay**below, case.decay * is_decayed


SIDES = ("chosen", "rejected")


def rate(case: Case, step: int, num_steps: int) -> float:
    """Learning rate of a step, counted from 0, over its peak."""
    if step < case.warmup:
        return (step + 1) / (case.warmup + 1)
    progress = (step - case.warmup) / (num_steps - case.warmup)
    shape = {"cosine": 0.5 + 0.5 * math.cos(math.pi * progress), "linear": 1 - progress, "constant": 1.0}[case.schedule]
    return case.min_ratio + (1 - case.min_ratio) * shape


def loss_of(rewards: Tensor, rows: list[Row], loss: dict[str, float], unit: float | None = None) -> Tensor:
    """Weighted mean over pairs of Bradley-Terry's loss and its regularizers.

    A step divides by its number of pairs times `unit`, the mean weight of all pairs, so that each pair weighs the same
    whatever its step.
    """
    dtype = rewards.dtype
    y, w, m = (torch.tensor([r[name] for r in rows], dtype=dtype) for name in ("label", "weight", "margin"))
    c, r = rewards.T
    z = loss.get("beta", 1.0) * (c - r - loss.get("margin_scale", 0.0) * m)
    p = y + loss.get("label_smoothing", 0.0) * (1 - 2 * y)
    losses = p * softplus(-z) + (1 - p) * softplus(z)
    losses = losses + loss.get("center_rewards", 0.0) * (c + r) ** 2 + loss.get("reward_l2", 0.0) * (c**2 + r**2) / 2
    return (w * losses).sum() / (w.sum() if unit is None else len(rows) * unit)


def agreement(rewards: np.ndarray, rows: list[Row]) -> tuple[float, float]:
    """Accuracy, ties one half, and mean margin of the pairs with a better side."""
    right, total, margin = 0.0, 0.0, 0.0
    for (c, r), row in zip(rewards.astype(float), rows, strict=True):
        if row["label"] == 0.5:
            continue
        lead = c - r if row["label"] > 0.5 else r - c
        right += row["weight"] * (1.0 if lead > 0 else 0.5 if lead == 0 else 0.0)
        margin += row["weight"] * lead
        total += row["weight"]
    return right / total, margin / total


class Stepper:
    """One optimizer's rule on each tensor."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.k = plain, 0
        self.state: dict[str, dict[str, Any]] = {name: {} for name in plain.trained}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        self.k += 1
        for name, p in self.plain.trained.items():
            share, decay = self.plain.rule_of(name)
            assert p.grad is not None
            lr, g, s, k = self.plain.case.lr * share * factor, p.grad, self.state[name], self.k
            if self.plain.case.optimizer == "adamw":
                s["m"] = 0.8 * s.get("m", 0.0) + 0.2 * g
                s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g**2
                p -= lr * (decay * p + s["m"] / (1 - 0.8**k) / ((s["v"] / (1 - 0.95**k)).sqrt() + 1e-4))
            elif self.plain.case.optimizer == "sgd":
                g = g + decay * p
                s["b"] = 0.7 * s["b"] + g if k > 1 else g.clone()
                p -= lr * (g + 0.7 * s["b"])
            else:  # Schedule-Free AdamW: gradients at y = 0.1 z + 0.9 x, evaluations at x
                x, z = s.setdefault("x", p.clone()), s.setdefault("z", p.clone())
                s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g**2
                z -= lr * (g / ((s["v"] / (1 - 0.999**k)).sqrt() + 1e-8) + decay * p)
                s["largest"] = max(lr, s.get("largest", 0.0))
                s["sum"] = s.get("sum", 0.0) + s["largest"] ** 2
                x += s["largest"] ** 2 / s["sum"] * (z - x)
                p.copy_(0.1 * z + 0.9 * x)

    @torch.no_grad()
    def scored(self, rows: list[Row]) -> np.ndarray:
        """Rewards by the weights that are evaluated."""
        kept = {name: p.clone() for name, p in self.plain.trained.items()}
        for name, p in self.plain.trained.items():
            p.copy_(self.state[name].get("x", p))
        found = self.plain.scored(rows)
        for name, p in self.plain.trained.items():
            p.copy_(kept[name])
        return found


@dataclass(frozen=True)
class Outcome:
    """A run's folder, and the same run by this file."""

    case: Case
    folder: Path
    val: list[Row]
    csv: list[dict[str, str]]
    run: dict[str, Any]
    steps: list[dict[str, float]]
    start: np.ndarray
    end: np.ndarray


@cache
def outcome(name: str, root: Path) -> Outcome:
    case = CASES[name]
    base, folder = root / name / "base", root / name / "run"
    tokenizer = tiny_tokenizer(case.family)
    tiny_model(case.family, tokenizer, seed=3, initializer_range=0.1).save_pretrained(base)
    tokenizer.save_pretrained(base)
    train, val = rows_of(case, case.num_train, 0), rows_of(case, case.num_val, 1)
    for kind, rows in (("train", train), ("val", val)):
        (root / name / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {f"data.{kind}": root / name / f"{kind}.jsonl" for kind in ("train", "val")}
    given |= {"model.path": base, "model.max_length": LENGTH, "optimizer": case.optimizer, "schedule": case.schedule}
    given |= {"hardware": "cpu", "hardware.num_threads": 1, "training.progress": "false", "logger.tensorboard": "false"}
    given |= {"batching.batch_size": case.batch, "training.epochs": case.epochs, "seed": SEED, "output_dir": folder}
    given |= {"optimizer.lr": case.lr, "optimizer.weight_decay": case.decay, "schedule.warmup_steps": case.warmup}
    given |= {f"loss.{key}": value for key, value in case.loss.items()}
    given |= {"training.num_bootstrap": case.num_bootstrap, "optimizer.head_lr_factor": case.head_factor}
    given |= {"optimizer.layer_lr_decay": case.layer_decay, "schedule.min_lr_ratio": case.min_ratio}
    given |= {} if case.clip is None else {"training.gradient_clip_norm": case.clip}
    config = typed(compose([*(f"{key}={value}" for key, value in given.items()), *case.options]), TrainConfig)
    began = time.perf_counter()
    train_reward_model(config)
    elapsed = time.perf_counter() - began

    start = starting_weights(json.loads((folder / "options.json").read_text()), config.data) if case.rank else {}
    plain = Plain(case, base, start)
    kept = [r for r in train if plain.ids(r["prompt"], r["chosen"]) != plain.ids(r["prompt"], r["rejected"])]
    assert len(kept) == len(train) - 1
    with (folder / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    before = plain.scored(val)
    stepper = Stepper(plain)
    steps = list(taken(case, plain, stepper, kept))
    run = json.loads((folder / "run.json").read_text())
    assert 0 < run["wall_seconds"] < elapsed
    assert run["pairs_per_second"] > len(kept) / elapsed
    return Outcome(case, folder, val, found, run, steps, before, stepper.scored(val))


def taken(case: Case, plain: Plain, stepper: Stepper, rows: list[Row]) -> Iterator[dict[str, float]]:
    """Numbers of each step."""
    per_epoch = math.ceil(len(rows) / case.batch)
    for step in range(case.epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = np.argsort(np.random.PCG64(np.random.SeedSequence([SEED, epoch])).random_raw(len(rows)), kind="stable")
        batch = [rows[i] for i in order[place * case.batch : (place + 1) * case.batch]]
        for p in plain.trained.values():
            p.grad = None
        rewards = plain.rewards(batch)
        loss = loss_of(rewards, batch, case.loss, sum(row["weight"] for row in rows) / len(rows))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(plain.trained.values(), case.clip or 1.0)
        factor = rate(case, step, case.epochs * per_epoch)
        stepper.step(factor)
        accuracy, margin = agreement(rewards.detach().numpy(), batch)
        largest = max(plain.rule_of(name)[0] for name in plain.trained)
        yield {
            "step": step + 1,
            "epoch": (step + 1) / per_epoch,
            "train_loss": loss.item(),
            "train_acc": accuracy,
            "train_margin": margin,
            "lr": case.lr * largest * factor,
            "grad_norm": norm.item(),
            "train_pairs": len(batch),
        }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oracle")


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_metrics_csv(name: str, root: Path):
    found = outcome(name, root)
    rows = [row for row in found.csv if row["train_loss"]]
    assert len(rows) == len(found.steps)
    for row, expected in zip(rows, found.steps, strict=True):
        for column, value in expected.items():
            assert float(row[column]) == pytest.approx(value, rel=2e-4, abs=2e-5), (expected["step"], column)


def shares(rewards: np.ndarray, rows: list[Row], case: Case) -> dict[str, float]:
    """The numbers that both metrics.csv and run.json have."""
    c, r = rewards.T
    y, w = (np.array([row[key] for row in rows]) for key in ("label", "weight"))
    beta = case.loss.get("beta", 1.0)
    p = expit(beta * (c - r))
    accuracy, margin = agreement(rewards, rows)
    folded, outcome_of = np.maximum(p, 1 - p), np.where(p > 0.5, y, np.where(p < 0.5, 1 - y, 0.5))
    gaps = [0.0] * 10
    for q, t, weight in zip(folded, outcome_of, w, strict=True):
        gaps[min(int((q - 0.5) * 20), 9)] += weight * (q - t)
    decided = y != 0.5
    return {
        "loss": loss_of(torch.from_numpy(rewards), rows, case.loss).item(),
        "acc": accuracy,
        "margin": margin,
        "pairs": len(rows),
        "nll": float((w * -(y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / w.sum()),
        "brier": float((w * (y * (1 - p) ** 2 + (1 - y) * p**2)).sum() / w.sum()),
        "ece": sum(map(abs, gaps)) / w.sum(),
        "tie_rate": float((w * (c == r))[decided].sum() / w[decided].sum()),
    }


@pytest.mark.parametrize("name", CASES)
def test_every_evaluation_of_metrics_csv(name: str, root: Path):
    found = outcome(name, root)
    rows = [row for row in found.csv if row["eval_loss"]]
    assert (rows[0]["step"], rows[-1]["step"]) == ("0", str(len(found.steps)))
    for row, rewards in ((rows[0], found.start), (rows[-1], found.end)):
        for column, value in shares(rewards, found.val, found.case).items():
            assert float(row[f"eval_{column}"]) == pytest.approx(value, rel=5e-4, abs=5e-5), (row["step"], column)


def stored(found: Outcome) -> list[Row]:
    return [json.loads(line) for line in (found.folder / "pair_rewards.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_pair_rewards_are_those_of_the_best_weights(name: str, root: Path):
    found = outcome(name, root)
    nll = {row["step"]: float(row["eval_nll"]) for row in found.csv if row["eval_nll"]}
    best = min(nll, key=nll.__getitem__)
    assert (found.run["best_step"], found.run["steps"]) == (int(best), len(found.steps))
    rows = stored(found)
    assert [(r["label"], r["weight"]) for r in rows] == [(r["label"], r["weight"]) for r in found.val]
    rewards = np.array([[r["chosen"], r["rejected"]] for r in rows])
    assert rewards[2, 0] == rewards[2, 1]
    if int(best) in (0, len(found.steps)):
        np.testing.assert_allclose(rewards, found.end if int(best) else found.start, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_run_json(name: str, root: Path):
    found = outcome(name, root)
    rewards, metrics = np.array([[r["chosen"], r["rejected"]] for r in stored(found)]), found.run["metrics"]
    values = shares(rewards, found.val, found.case)
    for ours, theirs in (("acc", "accuracy"), ("margin", "mean_margin"), ("nll", "nll"), ("brier", "brier")):
        assert metrics[theirs]["value"] == pytest.approx(values[ours], abs=1e-9), theirs
    assert metrics["ece"]["value"] == pytest.approx(values["ece"], abs=1e-9)
    assert metrics["tie_rate"] == pytest.approx(values["tie_rate"], abs=1e-12)
    c, r = rewards.T
    y, w = (np.array([row[key] for row in found.val]) for key in ("label", "weight"))
    gap = np.array([len(row["chosen"]) - len(row["rejected"]) for row in found.val])
    decided, side = y != 0.5, np.sign(y - 0.5)
    lead, v = (side * (c - r))[decided], w[decided]
    longer = 0.5 + 0.5 * (side * np.sign(gap))[decided]
    assert metrics["longer_wins"]["value"] == pytest.approx(np.average(longer, weights=v))
    assert metrics["over_length"]["value"] == pytest.approx(values["acc"] - np.average(longer, weights=v))
    assert metrics["negative_margin_rate"] == pytest.approx(v[lead < 0].sum() / v.sum())
    assert metrics["margin_std"] == pytest.approx(math.sqrt(np.cov(lead, aweights=v, ddof=0)), abs=1e-9)
    both, twice = rewards.ravel(), np.repeat(w, 2)
    assert metrics["reward_mean"] == pytest.approx((twice * both).sum() / twice.sum(), abs=1e-9)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(np.cov(both, aweights=twice, ddof=0)), abs=1e-9)
    order = np.argsort(lead)
    for share, quantile in zip((0.05, 0.25, 0.5, 0.75, 0.95), metrics["margin_quantiles"], strict=True):
        reached = next(i for i in order if v[lead <= lead[i]].sum() >= share * v.sum() * (1 - 1e-12))
        assert quantile == pytest.approx(lead[reached], abs=1e-9)
    better, worse = np.where(side > 0, c, r)[decided], np.where(side > 0, r, c)[decided]
    above = (better[:, None] > worse) + 0.5 * (better[:, None] == worse)
    assert metrics["roc_auc"]["value"] == pytest.approx((above * v[:, None] * v).sum() / v.sum() ** 2)
    prompt = np.unique([row["prompt"] for row in found.val], return_inverse=True)[1]
    totals = np.bincount(prompt, w)
    assert metrics["num_effective_prompts"] == pytest.approx(totals.sum() ** 2 / (totals**2).sum())
    heaviest = np.sort(totals)[::-1]
    half = next(n for n in range(1, len(totals) + 1) if heaviest[:n].sum() >= totals.sum() / 2 - 1e-9)
    counts = {"num_pairs": len(found.val), "num_undecided": int((~decided).sum()), "num_prompts": len(totals)}
    for key, value in (counts | {"num_prompts_of_half": half, "beta": found.case.loss.get("beta", 1.0)}).items():
        assert metrics[key] == value, key
    assert found.run["data"]["train_pairs"] == found.case.num_train - 1
    assert found.run["data"]["truncation"]["train"]["num_identical_dropped"] == 1
    assert found.run["data"]["length_baseline"] == pytest.approx(metrics["longer_wins"]["value"])
    _check_calibration(metrics, rewards, y, w)


def _check_calibration(metrics: dict[str, Any], rewards: np.ndarray, y: np.ndarray, w: np.ndarray) -> None:
    z = metrics["beta"] * (rewards[:, 0] - rewards[:, 1])
    p = expit(z)
    q, t = np.maximum(p, 1 - p), np.where(z > 0, y, np.where(z < 0, 1 - y, 0.5))
    bins = np.minimum((q - 0.5) * 20, 9).astype(int)
    assert [each["num_pairs"] for each in metrics["reliability"]] == np.unique(bins, return_counts=True)[1].tolist()
    for each, place in zip(metrics["reliability"], np.unique(bins), strict=True):
        inside = bins == place
        share, n = np.average(t[inside], weights=w[inside]), w[inside].sum() ** 2 / (w[inside] ** 2).sum()
        z2 = stats.norm.ppf(0.975) ** 2  # Wilson (1927): the roots of (f - x)^2 = z^2 x (1 - x) / n
        ends = sorted(np.roots([1 + z2 / n, -2 * share - z2 / n, share**2]).real)
        assert (each["low"], each["high"]) == pytest.approx((0.5 + place / 20, 0.55 + place / 20))
        assert each["mean_confidence"] == pytest.approx(np.average(q[inside], weights=w[inside]))
        assert each["frequency"] == pytest.approx(share)
        assert [each["frequency_low"], each["frequency_high"]] == pytest.approx(ends)
    rng, noise = np.random.default_rng(1), []
    for _ in range(3000):
        drawn = np.where(q > 0.5, rng.random(len(q)) < q, q)
        noise.append(np.abs(np.bincount(bins, w * (q - drawn), minlength=10)).sum() / w.sum())
    assert metrics["ece_noise_floor"] == pytest.approx(np.mean(noise), abs=4 * np.std(noise) / math.sqrt(200))

    def nll(inverse: float) -> float:
        return float(np.average(y * np.logaddexp(0, -inverse * z) + (1 - y) * np.logaddexp(0, inverse * z), weights=w))

    fit = metrics["temperature"]
    best = optimize.minimize_scalar(nll, bounds=(0.0, 200.0), method="bounded", options={"xatol": 1e-9})
    if fit["temperature"] is None:
        assert best.x < 1e-3 or best.x > 199
    else:
        assert fit["temperature"] == pytest.approx(1 / best.x, rel=1e-4)
        assert fit["nll"] == pytest.approx(best.fun, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_intervals_of_run_json(name: str, root: Path):
    """Student's over the jackknife below 40 prompts; else scipy's BCa of resampled prompts, within 0.25 errors."""
    found = outcome(name, root)
    metrics = found.run["metrics"]
    rewards = np.array([[r["chosen"], r["rejected"]] for r in stored(found)])
    prompt = np.unique([row["prompt"] for row in found.val], return_inverse=True)[1]
    members = [np.flatnonzero(prompt == each) for each in range(prompt.max() + 1)]
    bounds = {"acc": (0.0, 1.0), "brier": (0.0, 1.0), "nll": (-9e9, 9e9), "margin": (-9e9, 9e9), "ece": (0.0, 1.0)}
    names = {"acc": "accuracy", "margin": "mean_margin"}

    def values(prompts: np.ndarray) -> dict[str, float]:
        index = np.concatenate([members[each] for each in prompts])
        return shares(rewards[index], [found.val[i] for i in index], found.case)

    everything = np.arange(len(members))
    decided = np.array([i for i in everything if any(found.val[row]["label"] != 0.5 for row in members[i])])
    whole, rng, sampled = values(everything), np.random.default_rng(9), {}
    for kept in (decided, everything):  # prompts without a better response are no samples of accuracy and margin
        left_out = [values(np.delete(kept, i)) for i in range(len(kept))]
        draws = [values(rng.choice(kept, size=len(kept))) for _ in range(600)] if len(kept) >= 40 else []
        sampled |= dict.fromkeys(("acc", "margin") if kept is decided else ("nll", "brier", "ece"), (left_out, draws))
    for key, (lowest, highest) in bounds.items():
        got, (left_out, draws) = metrics[names.get(key, key)], sampled[key]
        count, few = len(left_out), not draws
        jackknife = np.array([each[key] for each in left_out])
        error = math.sqrt((count - 1) * jackknife.var())
        assert got["num_samples"] == count
        if few:
            half = stats.t.ppf(0.975, count - 1) * error
            low, high = max(whole[key] - half, lowest), min(whole[key] + half, highest)
            assert got["standard_error"] == pytest.approx(error, rel=1e-6), key
            assert (got["low"], got["high"]) == pytest.approx((0.0 if key == "ece" else low, high), rel=1e-6), key
            continue
        drawn = np.array([each[key] for each in draws])
        assert got["standard_error"] == pytest.approx(drawn.std(), rel=0.15), key
        if key == "ece":
            tails = 2 * whole[key] - np.quantile(drawn, [0.975, 0.025])
            half = stats.t.ppf(0.975, count - 1) * drawn.std()
            low, high = min(max(tails[0], 0), whole[key] - half), max(tails[1], whole[key] + half)
            low = max(low, 0.0)
        else:
            shift = stats.norm.ppf((drawn < whole[key] - 1e-12).mean() + (abs(drawn - whole[key]) <= 1e-12).mean() / 2)
            skew = jackknife.mean() - jackknife
            a = (skew**3).sum() / (6 * (skew**2).sum() ** 1.5)
            z = shift + stats.norm.ppf([0.025, 0.975])
            low, high = np.quantile(drawn, stats.norm.cdf(shift + z / (1 - a * z)))
        assert (got["low"], got["high"]) == pytest.approx((low, high), abs=0.35 * error), key
