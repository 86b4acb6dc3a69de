"""Every number and file of an evaluation, and the doctor's numbers, from rewards by plain transformers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.special import expit

from rm_optimizer.core.classifier import scoring
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, pair_fingerprints
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor import model as doctor_model
from rm_optimizer.doctor.doctor import Diagnosis, diagnose
from rm_optimizer.doctor.probe_conversations import probe_ids
from rm_optimizer.evaluation.saved_model import Evaluation, evaluate_model
from tests.builders import tiny_reward_model
from tests.oracles.formulas import ends, hidden, jackknifed, student, wilson

BETA, LENGTH = 1.6, 60
WORDS = ("yes", "no", "egg", "water", "seven", "blue", "it", "runs")


def made(i: int, rng: np.random.Generator) -> PreferencePair:
    sides = [" ".join(rng.choice(WORDS, size=rng.integers(1, 5))) + f" {i}{side}" for side in "ab"]
    metadata = {"id": f"row {i}", "source": "st"[i % 2], "subset": "uvw"[i % 3], "topic": i % 4}
    label, weight = float(rng.choice([1.0, 1.0, 0.9, 0.5, 0.2])), float(rng.choice([1.0, 2.0, 0.5]))
    return PreferencePair(f"ask {i % 13}", *sides, label=label, weight=weight, metadata=metadata)


@pytest.fixture(scope="module")
def model() -> BradleyTerryRM:
    model = tiny_reward_model("llama", max_length=LENGTH)
    model.beta = BETA
    return model


@pytest.fixture(scope="module")
def pairs(model: BradleyTerryRM) -> list[PreferencePair]:
    """Pairs that the model ranks as labeled in two of three cases, one of them equal after truncation."""
    rng, found = np.random.default_rng(0), []
    for pair in (made(i, rng) for i in range(54)):
        is_right = (reward(model, pair.prompt, pair.chosen) > reward(model, pair.prompt, pair.rejected)) == (
            pair.label > 0.5
        )
        turned = replace(pair, chosen=pair.rejected, rejected=pair.chosen)
        found.append(pair if is_right or len(found) % 3 == 0 else turned)
    long = "never " * 60
    found[7] = replace(found[7], chosen=f"{long}yes", rejected=f"{long}no", label=1.0)
    return found


def reward(model: BradleyTerryRM, prompt: Any, response: str) -> float:
    """By plain transformers, one sequence at a time; the right of a response that is too long is lost."""
    tokens = model.tokenizer(f"Prompt: {prompt}\n\nResponse: {response}", add_special_tokens=False).input_ids
    alone = model.tokenizer(f"Prompt: {prompt}\n\nResponse: ", add_special_tokens=False).input_ids
    start = next((i for i, pair in enumerate(zip(alone, tokens, strict=False)) if pair[0] != pair[1]), len(alone))
    room = LENGTH - 1
    tokens = tokens[min(start, max(0, len(tokens) - room)) :][:room]
    with torch.no_grad():
        return float(model.model(input_ids=torch.tensor([[*tokens, model.tokenizer.eos_token_id]])).logits)


class Scored:
    """Rewards of pairs, and statistics of some of them."""

    def __init__(self, model: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> None:
        sides = ([reward(model, pair.prompt, getattr(pair, side)) for pair in pairs] for side in ("chosen", "rejected"))
        self.c, self.r = (np.array(side) for side in sides)
        self.prompts = [str(pair.prompt) for pair in pairs]
        self.y, self.w = (np.array([getattr(pair, name) for pair in pairs]) for name in ("label", "weight"))
        self.gap = np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs])

    def right(self, lead: np.ndarray, rows: np.ndarray | None = None, weighted: bool = True) -> float:
        """Accuracy of a lead of chosen, ties one half, over the pairs with a better side."""
        rows = np.arange(len(self.y)) if rows is None else rows
        rows = rows[self.y[rows] != 0.5]
        each = 0.5 + 0.5 * np.sign(lead[rows]) * np.sign(self.y[rows] - 0.5)
        return float(np.average(each, weights=self.w[rows] if weighted else None))

    def estimate(self, statistic: Callable[[np.ndarray], float], bounds: tuple[float, float]) -> tuple[float, ...]:
        value = statistic(np.arange(len(self.y)))
        decided = np.flatnonzero(self.y != 0.5)
        left = jackknifed(lambda rows: statistic(decided[rows]), [self.prompts[i] for i in decided])
        error, low, high = student(value, left)
        return value, error, max(low, bounds[0]), min(high, bounds[1])

    def accuracy(self, lead: np.ndarray, weighted: bool = True) -> tuple[float, ...]:
        return self.estimate(lambda rows: self.right(lead, rows, weighted), (0.0, 1.0))


@pytest.fixture(scope="module")
def evaluated(
    model: BradleyTerryRM, pairs: list[PreferencePair], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Evaluation, Path]:
    folder = tmp_path_factory.mktemp("evaluation")
    options: dict[str, Any] = {"by": ["topic"], "thresholds": [0.4, -0.3], "num_bootstrap": 3, "seed": 5}
    return evaluate_model(model, pairs, output_dir=folder, token_budget=700, **options), folder


def test_files_of_an_evaluation(model: BradleyTerryRM, pairs: list[PreferencePair], evaluated: tuple[Evaluation, Path]):
    own, (found, folder) = Scored(model, pairs), evaluated
    rows = [json.loads(line) for line in (folder / "pair_rewards.jsonl").read_text().splitlines()]
    assert [row["chosen"] for row in rows] == pytest.approx(own.c, abs=1e-4)
    assert [row["rejected"] for row in rows] == pytest.approx(own.r, abs=1e-4)
    for row, pair in zip(rows, pairs, strict=True):
        assert {name: row[name] for name in ("id", "source", "subset", "topic")} == pair.metadata
        assert (row["label"], row["weight"]) == (pair.label, pair.weight)
        assert (row["pair_id"], row["prompt_id"]) == (pair.pair_id, pair.prompt_id)
    drawn = json.loads((folder / "reward_distributions.json").read_text())
    for name, values in (("chosen", own.c), ("rejected", own.r), ("margin", own.c - own.r)):
        assert (drawn[name]["mean"], drawn[name]["std"]) == pytest.approx((values.mean(), values.std()), abs=1e-4)
        for share, value in drawn[name]["quantiles"].items():
            assert value == pytest.approx(np.quantile(values, float(share)), abs=1e-4)
        assert (sum(drawn[name]["histogram"]["counts"]), len(drawn[name]["histogram"]["edges"])) == (54, 41)
    assert (found.truncation.num_identical_dropped, found.truncation.num_response_cut) == (1, 1)
    stored = json.loads((folder / "metrics.json").read_text())
    assert stored["accuracy"]["value"] == found.metrics.accuracy.value
    assert (found.metrics.beta, found.num_skipped, found.has_default_length) == (BETA, 0, False)
    assert found.trained_on is None


def test_groups_thresholds_and_the_area_under_the_curve(
    model: BradleyTerryRM, pairs: list[PreferencePair], evaluated: tuple[Evaluation, Path]
):
    own, metrics = Scored(model, pairs), evaluated[0].metrics
    assert ends(metrics.accuracy) == pytest.approx(own.accuracy(own.c - own.r), rel=1e-5)
    columns = {"source": lambda pair: pair.metadata["source"]}
    for name in ("subset", "topic"):  # within a source
        columns[name] = lambda pair, name=name: f"{pair.metadata['source']} / {pair.metadata[name]}"
    assert metrics.groups.keys() == columns.keys()
    for column, of in columns.items():
        values = [of(pair) for pair in pairs]
        assert metrics.groups[column].keys() == set(values)
        for value, group in metrics.groups[column].items():
            part = Scored(model, [pair for pair, each in zip(pairs, values, strict=True) if each == value])
            assert group.accuracy.value == pytest.approx(part.right(part.c - part.r)), (column, value)
            p = expit(BETA * (part.c - part.r))
            nll = -np.average(part.y * np.log(p) + (1 - part.y) * np.log(1 - p), weights=part.w)
            assert group.nll.value == pytest.approx(nll, abs=1e-4)
    parts = [Scored(model, [pair for pair in pairs if pair.metadata["source"] == name]) for name in "st"]
    shares = [part.accuracy(part.c - part.r) for part in parts]
    macro = metrics.macro_accuracy
    assert macro is not None
    assert macro.value == pytest.approx(np.mean([share[0] for share in shares]))
    assert macro.standard_error == pytest.approx(math.hypot(*(share[1] for share in shares)) / 2, rel=1e-5)
    kept = own.y != 0.5
    better, worse = (np.where((own.y > 0.5) == side, own.c, own.r)[kept] for side in (True, False))
    w = own.w[kept]
    for threshold, rates in zip((0.4, -0.3), metrics.threshold_rates, strict=True):
        tpr, fpr = (np.average(side >= threshold, weights=w) for side in (better, worse))
        assert (rates.threshold, rates.tpr, rates.fpr, rates.fnr) == pytest.approx((threshold, tpr, fpr, 1 - tpr))
    above = (better[:, None] > worse) + 0.5 * (better[:, None] == worse)
    area = (above * w[:, None] * w).sum() / w.sum() ** 2
    placed = w * (above @ w + w @ above - 2 * area * w.sum()) / w.sum()  # DeLong et al. (1988), sums over prompts
    names = np.array(own.prompts)[kept]
    sums = np.array([placed[names == each].sum() for each in sorted(set(names))])
    error = math.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / w.sum()
    half = stats.t.ppf(0.975, len(sums) - 1) * error
    assert ends(metrics.roc_auc) == pytest.approx((area, error, max(area - half, 0), min(area + half, 1)), rel=1e-5)


Diagnosed = tuple[list[PreferencePair], list[PreferencePair], Diagnosis]


@pytest.fixture(scope="module")
def diagnosed(model: BradleyTerryRM, pairs: list[PreferencePair]) -> Diagnosed:
    """Two data sets: the second repeats a pair, turns one round, and has a prompt of the first and three margins."""
    turned = replace(pairs[43], chosen=pairs[43].rejected, rejected=pairs[43].chosen, label=1.0)
    second = [*pairs[40:43], replace(pairs[43], label=1.0), *pairs[44:], pairs[41], turned]
    second = [replace(pair, prompt=f"other {pair.prompt}") if i else pair for i, pair in enumerate(second)]
    for place, margin, label in ((5, -1.0, 0.9), (6, 2.0, 1.0), (7, 1.0, 0.5)):
        second[place] = replace(second[place], margin=margin, label=label)
    data = {"train": PreferenceDataset(pairs[:40]), "val": PreferenceDataset(second)}
    record = TrainedPairs.of(pair_fingerprints(pairs[:3]))
    found = diagnose(model, data, seed=4, max_pairs=74, max_audited_pairs=40, token_budget=900, trained=record)
    return pairs[:40], second, found


def scored_of(diagnosed: Diagnosed) -> list[PreferencePair]:
    """At most 37 pairs of each data set, one of them equal after truncation."""
    kept = np.sort(np.random.default_rng(4).permutation(40)[:37])
    assert 7 in kept
    return [*(diagnosed[0][i] for i in kept), *diagnosed[1]]


def test_the_doctors_counts_of_pairs(diagnosed: Diagnosed):
    first, second, found = diagnosed
    assert found.num_pairs == found.num_pairs_audited == {"train": 40, "val": 16}
    assert found.num_pairs_scored == {"train": 37, "val": 16}
    measured = {check.name: check.measured for check in found.checks}
    both = [*first, *second]
    undecided = sum(pair.label == 0.5 for pair in both)
    shares = {"unseen_pairs": 3 / 56, "repeated_pairs": 1 / 16, "contradictions": 1 / 16, "labels": undecided / 56}
    shares |= {"split_leakage": 1, "margins": 1, "response_truncation": 1 / 40, "identical_pairs": 1 / 40}
    assert {name: measured[name] for name in shares} == pytest.approx(shares)
    details = {"rejected_preferred": sum(pair.label < 0.5 for pair in both)}
    assert found.check("labels").details == details | {"soft_labels": sum(pair.label in (0.9, 0.2) for pair in both)}
    assert found.check("margins").details == {"with_margin": 3, "contrary_margins": 1}
    rules, markers = [], []
    for part in (first, second):
        decided = [(pair, pair.label > 0.5) for pair in part if pair.label != 0.5]
        ordered = [(p.chosen, p.rejected, p.weight) if up else (p.rejected, p.chosen, p.weight) for p, up in decided]
        longer = [0.5 + 0.5 * np.sign(len(better) - len(worse)) for better, worse, _ in ordered]
        num_prompts = len({pair.prompt for pair, _ in decided})
        rules.append((np.average(longer, weights=[weight for *_, weight in ordered]), num_prompts))
        leads = [
            sum((word in better.split()) - (word in worse.split()) for better, worse, _ in ordered)
            for word in {word for better, worse, _ in ordered for word in f"{better} {worse}".split()}
        ]
        markers.append((0.5 + max(map(abs, leads)) / 2 / len(ordered), num_prompts))
    for name, found_ones in (("longer_wins", rules), ("marker_wins", markers)):
        check, (value, count) = found.check(name), max(found_ones, key=lambda pair: pair[0])
        assert check.measured == pytest.approx(value)
        assert [check.details["low"], check.details["high"]] == pytest.approx(wilson(value, count))


def test_the_doctors_numbers_of_rewards(model: BradleyTerryRM, diagnosed: Diagnosed):
    found, both = diagnosed[2], scored_of(diagnosed)
    own = Scored(model, both)
    margin, decided = own.c - own.r, own.y != 0.5
    value, _, low, high = own.accuracy(margin)
    check = found.check("label_agreement")
    assert (check.measured, check.details["low"], check.details["high"]) == pytest.approx((value, low, high))
    sign = -1 if own.right(own.gap) < 0.5 else 1
    above = own.estimate(lambda rows: own.right(margin, rows) - own.right(sign * own.gap, rows), (-1.0, 1.0))
    check = found.check("beats_length")
    expected = (above[0], *above[2:], value, own.right(sign * own.gap))
    assert (
        check.measured,
        *(check.details[name] for name in ("low", "high", "accuracy", "length_rule")),
    ) == pytest.approx(expected)
    kept = margin != 0  # without the pair that is equal after truncation
    check, rewards = found.check("reward_spread"), np.stack([own.c, own.r])[:, kept]
    assert (check.measured, check.details["mean"]) == pytest.approx((rewards.std(), rewards.mean()), abs=1e-4)
    rho = stats.spearmanr(margin[kept], own.gap[kept]).statistic
    ends_of = np.tanh(np.arctanh(rho) + np.array([-1, 1]) * 1.96 * 1.03 / math.sqrt(kept.sum() - 3))
    check = found.check("reward_length")
    assert check.measured == pytest.approx(rho)
    assert [check.details["low"], check.details["high"]] == pytest.approx(ends_of)

    def nll(inverse: float) -> float:
        z = inverse * BETA * margin
        return float(np.average(own.y * np.logaddexp(0, -z) + (1 - own.y) * np.logaddexp(0, z), weights=own.w))

    check = found.check("calibration")
    best = optimize.minimize_scalar(nll, bounds=(1e-3, 30), method="bounded", options={"xatol": 1e-9}).x
    assert check.measured == pytest.approx(1 / best, rel=1e-3)
    p = expit(BETA * margin)
    q, t = np.maximum(p, 1 - p), np.where(margin > 0, own.y, np.where(margin < 0, 1 - own.y, 0.5))
    bins = np.minimum((q - 0.5) * 20, 9).astype(int)
    assert check.details["ece"] == pytest.approx(abs(np.bincount(bins, own.w * (q - t))).sum() / own.w.sum(), abs=1e-4)
    scores = {}
    for name in "st":
        inside = [pair.metadata["source"] == name for pair in both]
        parts = [
            [p for p, i, k, d in zip(both, inside, kept, decided, strict=True) if (i == side) and k and d]
            for side in (True, False)
        ]
        if min(map(len, parts)) >= 20:
            mine, others = (Scored(model, part) for part in parts)
            mine, others = (part.accuracy(part.c - part.r, weighted=False) for part in (mine, others))
            scores[(others[0] - mine[0]) / math.hypot(mine[1], others[1])] = mine[0]
    assert found.check("label_groups").measured == pytest.approx(scores[max(scores)])


def test_the_doctors_probe_of_hidden_states(model: BradleyTerryRM, diagnosed: Diagnosed):
    """Ridge regression on the other folds of prompts, which are the sorted digests in turn."""
    found = diagnosed[2]
    rows = [pair for pair in scored_of(diagnosed) if pair.label != 0.5 and "never never" not in pair.chosen]
    x = np.array([np.subtract(*(hidden(model, p.prompt, text) for text in (p.chosen, p.rejected))) for p in rows])
    x, y = x / np.sqrt((x**2).mean(axis=0)), np.array([np.sign(pair.label - 0.5) for pair in rows])
    marks = [hashlib.sha256(f"4:{pair.prompt_id}".encode()).digest() for pair in rows]
    fold = np.array([sorted(set(marks)).index(mark) % 5 for mark in marks])

    def held_out(y: np.ndarray) -> np.ndarray:
        predicted = np.zeros_like(y)
        for held in range(5):
            kept = x[fold != held]
            ridge = (kept**2).sum(axis=1).mean() * np.eye(x.shape[1])
            predicted[fold == held] = x[fold == held] @ np.linalg.solve(kept.T @ kept + ridge, kept.T @ y[fold != held])
        return predicted

    value, _, low, high = Scored(model, rows).accuracy(held_out(y), weighted=False)
    check = found.check("label_signal")
    assert (check.measured, check.details["low"], check.details["high"]) == pytest.approx((value, low, high))
    texts = [tuple(sorted((pair.chosen, pair.rejected))) for pair in rows]  # of which a random one wins everywhere
    wins = np.random.default_rng(4).choice((-1.0, 1.0), size=(len(order := list(dict.fromkeys(texts))), 32))
    drawn = np.array([wins[order.index(t)] * (1 if p.chosen == t[0] else -1) for p, t in zip(rows, texts, strict=True)])
    right = (np.sign(held_out(drawn)) == drawn).mean(axis=0)
    control = found.check("label_shuffle")
    assert check.details["shuffled"] == control.measured == pytest.approx(right.mean())
    assert control.details["standard_error"] == pytest.approx(stats.sem(right))


def test_a_change_of_rewards_is_measured_in_their_spread(model: BradleyTerryRM, monkeypatch: pytest.MonkeyPatch):
    """Each row of a batch gets 0.01 more than the one above it, in float32."""
    exact, probe = scoring.decoder_logits, probe_ids(model)
    monkeypatch.setattr(
        scoring, "decoder_logits", lambda *given: (found := exact(*given)) + 0.01 * torch.arange(len(found))[:, None]
    )
    shortest = min(map(len, probe))
    with torch.no_grad():
        rewards = np.array([float(model.model(input_ids=torch.tensor([ids[-shortest:]])).logits) for ids in probe])
        cut = [ids[: model.max_length - 3] for ids in probe]  # three columns are added
        padded = np.array([float(model.model(input_ids=torch.tensor([ids])).logits) for ids in cut])
    most = 0.01 * (len(probe) - 1)
    assert doctor_model.batch(model, probe).measured == pytest.approx(most / rewards.std(), rel=1e-3)
    assert doctor_model.padding(model, probe).measured == pytest.approx(most / padded.std(), rel=1e-3)
