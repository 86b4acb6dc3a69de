"""Measured readiness in every number, from the pairs, the pool and the questions that the oracle was asked."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.special import expit, log_expit
from torch import Tensor

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector
from rm_optimizer.rl_coupling.readiness.fitted import fitted_readiness
from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions, measure_readiness
from rm_optimizer.rl_coupling.readiness.probe import ResponsePool, ScorerOracle, StoppingRule
from rm_optimizer.rl_coupling.readiness.report import Evidence, RLReadinessReport, conclude
from rm_optimizer.rl_coupling.rollouts import RewardModelCreditAssigner
from tests.builders import tiny_reward_model
from tests.oracles.formulas import clustered, ends, hidden, jackknifed, student
from tests.rl_coupling.rollouts import episode

SEED, BETA, KEPT = 3, 1.6, 66
RNG = np.random.default_rng(0)
SENTENCES = ("Put it in water.", "Seven minutes!", "Is it so?", "The lazy dog.", "One two three.", "Paris.")


def text() -> str:
    return " ".join(RNG.choice(SENTENCES, size=RNG.integers(1, 4)))


def pair(i: int) -> PreferencePair:
    """A pair whose label the model's margin tells in two of three cases."""
    sides, noise = (f"{text()} {i}", f"{text()} - {i}"), float(RNG.choice([1.0, 1.0, 0.8, 0.5, 0.3]))
    rewards = MODEL.score([f"ask {i % 17}"] * 2, sides)
    sides = sides if rewards[0] > rewards[1] or i % 3 == 0 else sides[::-1]
    metadata = {"subset": "all", "source": "aab"[i % 3] if i < 60 else "c"}
    return PreferencePair(f"ask {i % 17}", *sides, label=noise, metadata=metadata)


MODEL = tiny_reward_model("llama", max_length=256)
PAIRS = [pair(i) for i in range(72)]
PROMPTS = [f"question {i}" for i in range(9)]
RESPONSES = [[f"{text()} {i} {j}" for j in range(6)] for i in range(9)]
POOL = ResponsePool(PROMPTS, RESPONSES, np.round(RNG.normal(size=(9, 6)) + RNG.normal(size=(9, 1)), 1))
POOL.rewards[2, :4] = 0.3
RULE = StoppingRule(200, 20, 0.14)
SIZES = {"num_bootstrap": 5, "seed": SEED, "max_pairs": KEPT, "rule": RULE, "on_policy_pairs": 30, "group_size": 4}


class Judge(Scorer):
    """Gold reward by the text, and a judge that keeps its questions and leaves some open."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.scored: list[str] = []

    def reward(self, text: str) -> float:
        return -3 * math.sin(len(text)) - sum(map(ord, text)) % 5

    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> Tensor:
        self.scored += responses
        return torch.tensor([self.reward(text) for text in responses], dtype=torch.float64)

    def answer(self, prompt: str, first: str, second: str) -> float:
        if (len(first) * len(second)) % 11 == 0:
            return math.nan
        return 0.5 if first == second else float(np.round(expit(self.reward(first) - self.reward(second)), 1))

    def prefer(self, prompts: Sequence[Any], first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        asked = list(zip(prompts, first, second, strict=True))
        self.asked += asked
        return np.array([self.answer(*each) for each in asked])


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Judge, RLReadinessReport]:
    model, judge = MODEL, Judge()
    model.beta = BETA
    members = [Member(seed) for seed in (1, 2, 3)]
    options = ReadinessOptions(ceiling=0.93, **SIZES)
    began = time.perf_counter()
    found = measure_readiness(
        *(model, PreferenceDataset(PAIRS), POOL, judge),
        algorithm="grpo",
        options=options,
        ensemble=RewardModelEnsemble(members),
        top_eigenvalue=7.5,
    )
    assert 0 < found.sample.wall_seconds < time.perf_counter() - began
    return model, judge, found


class Member(Scorer):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> Tensor:
        return torch.tensor([math.sin(self.seed * sum(map(ord, text))) * self.seed for text in responses])


class Alike(Scorer):
    def score(self, prompts: Sequence[Any], responses: Sequence[str]) -> Tensor:
        return torch.ones(len(responses))


def sampled() -> list[PreferencePair]:
    return [PAIRS[i] for i in np.sort(np.random.default_rng(SEED).permutation(len(PAIRS))[:KEPT])]


def margins(model: Any, pairs: Sequence[PreferencePair]) -> np.ndarray:
    sides = [model.score([p.prompt for p in pairs], [getattr(p, s) for p in pairs]) for s in ("chosen", "rejected")]
    return (sides[0] - sides[1]).double().numpy()


def test_features_of_pairs(measured: tuple[Any, Judge, RLReadinessReport]):
    model, _, report = measured
    pairs, found = sampled(), report.features
    margin, prompt = margins(model, pairs), np.array([pair.prompt for pair in pairs])
    y = np.array([pair.label for pair in pairs])
    kept = y != 0.5
    right = np.where(margin == 0, 0.5, (margin > 0) == (y > 0.5))
    share, error, low, high = clustered(right[kept], prompt[kept])
    assert ends(found["accuracy"]) == pytest.approx((share, error, low, high), rel=1e-5)
    relative = [(x - 0.5) / 0.43 for x in (share, low, high)]
    assert ends(found["accuracy_relative"]) == pytest.approx((relative[0], error / 0.43, *relative[1:]), rel=1e-5)
    sources = [str(pair.metadata["source"]) for pair in pairs]
    few = {name for name, count in Counter(sources).items() if count < 20}
    slices = np.array(["other" if name in few else name for name in sources])
    assert len(set(slices)) >= 2

    def worst(rows: np.ndarray) -> float:
        rows = rows[kept[rows]]
        return min(right[rows][slices[rows] == name].mean() for name in np.unique(slices[rows]))  # 20 % of 2 or 3

    value = worst(np.arange(len(pairs)))
    error, low, high = student(value, jackknifed(worst, prompt))
    expected = (value, error, max(low, 0.0), min(high, 1.0))
    assert ends(found["worst_slice_accuracy"]) == pytest.approx(expected, rel=1e-5)
    order = np.random.default_rng(SEED).permutation(17)
    half = order[np.unique([pair.prompt_id for pair in pairs], return_inverse=True)[1]] % 2

    def nll(inverse: float, rows: np.ndarray) -> float:
        z = inverse * BETA * margin[rows]
        return float(-(y[rows] * log_expit(z) + (1 - y[rows]) * log_expit(-z)).mean())

    def best(rows: np.ndarray) -> float:
        return float(optimize.minimize_scalar(nll, bounds=(0, 50), args=(rows,), method="bounded").x)

    inverse = np.array([best(half != side) for side in half])
    q = expit(inverse * BETA * margin)
    scores = {
        "nll": -(y * np.log(q) + (1 - y) * np.log(1 - q)),
        "brier": y * (1 - q) ** 2 + (1 - y) * q**2,
    }
    for name, each in scores.items():
        error, low, high = student(each.mean(), jackknifed(lambda rows, each=each: each[rows].mean(), prompt))
        assert ends(found[name]) == pytest.approx((each.mean(), error, low, high), abs=1e-4)
    whole = best(np.ones(len(pairs), dtype=bool))
    if whole > 1e-3:
        assert report.unscored["temperature"].value == pytest.approx(1 / whole, rel=1e-3)
    else:
        assert "temperature" not in report.unscored


def test_edits_of_style(measured: tuple[Any, Judge, RLReadinessReport]):
    model, _, report = measured
    flips: dict[str, list[tuple[bool, str]]] = {name: [] for name in ("list", "bold", "paragraphs", "courtesy")}
    for pair, margin in zip(sampled(), margins(model, sampled()), strict=True):
        loser, winner = (pair.rejected, pair.chosen) if margin > 0 else (pair.chosen, pair.rejected)
        parts = re.split(r"(?<=[.!?])\s+", loser)
        edited = {"list": "\n".join(f"- {part}" for part in parts), "paragraphs": "\n\n".join(parts)}
        edited |= {"bold": " ".join([f"**{parts[0]}**", *parts[1:]]), "courtesy": f"{loser} I hope this helps!"}
        for name, new in edited.items():
            if new != loser:
                top, other = model.score([pair.prompt] * 2, [winner, new]).tolist()
                flips[name].append((other > top, str(pair.prompt)))
    whole = [row for rows in flips.values() for row in rows]
    for name, rows in (
        {f"style_flips_edit_{key}": rows for key, rows in flips.items()} | {"style_flips": whole}
    ).items():
        expected = clustered(np.array([float(flip) for flip, _ in rows]), [prompt for _, prompt in rows])
        assert ends(report.features[name]) == pytest.approx(expected, rel=1e-6), name


def test_features_of_the_pool(measured: tuple[Any, Judge, RLReadinessReport]):
    report, r = measured[2], POOL.rewards
    found, prompts = report.features, np.arange(9)

    def spread(rows: np.ndarray) -> float:
        within = r[rows].var(axis=1, ddof=1).mean()
        between = r[rows].mean(axis=1).var(ddof=1) - within / 6
        return float(within / (within + max(between, 0)))

    tied = [np.mean([len(set(group)) == 1 for group in itertools.combinations(row, 4)]) for row in r]
    assert ends(found["tied_groups"]) == pytest.approx(clustered(np.array(tied), prompts))
    length = np.array([[len(text) for text in row] for row in RESPONSES])

    def follows(rows: np.ndarray) -> float:  # of the residuals of a regression on the prompts
        both = [(each[rows] - each[rows].mean(axis=1, keepdims=True)).ravel() for each in (r, length)]
        return float(np.corrcoef(*both)[0, 1])

    for name, statistic, lowest in (("reward_spread", spread, 0.0), ("length_correlation", follows, -math.inf)):
        value = statistic(prompts)
        error, low, high = student(value, jackknifed(statistic, prompts))
        high = min(high, 1.0) if lowest == 0 else high
        assert ends(found[name]) == pytest.approx((value, error, max(low, lowest), high))
    z = []
    for seed in (1, 2, 3):
        table = np.array([[math.sin(seed * sum(map(ord, text))) for text in row] for row in RESPONSES])
        table -= table.mean(axis=1, keepdims=True)
        z.append(table / table.std())
    of_prompts = np.var(z, axis=0, ddof=1).mean(axis=1)
    value = math.sqrt(of_prompts.mean())
    assert report.unscored["epistemic_std"].value == pytest.approx(value, rel=1e-5)
    assert report.unscored["epistemic_std"].standard_error == pytest.approx(stats.sem(of_prompts) / 2 / value, rel=1e-5)
    assert report.unscored["top_eigenvalue"].value == 7.5
    rng, rows, columns = np.random.default_rng([SEED, 7]), *np.indices((9, 6)).reshape(2, -1)
    one_side = [hidden(MODEL, p.prompt, p.chosen if rng.random() < 0.5 else p.rejected) for p in sampled()]
    drawn = rng.permutation(54)
    new = [hidden(MODEL, PROMPTS[rows[i]], RESPONSES[rows[i]][columns[i]]) for i in drawn]
    far = MahalanobisDetector(np.array(one_side), seed=SEED).detect(np.array(new)).is_ood  # which has its own oracle
    expected = clustered(np.array(far, dtype=float), rows[drawn])
    assert ends(report.unscored["policy_out_of_distribution"]) == pytest.approx(expected)


def looked(wins: np.ndarray, prompts: Sequence[str]) -> tuple[int, tuple[float, ...], str]:
    """Questions after which a probe stops, its rate, and the reason, by the rule of 200, 20 and 0.14."""
    stop, before, rate = 20, 0, (math.nan,) * 4
    while before < 200:
        known = np.isfinite(wins[:stop])
        rate = clustered(wins[:stop][known], np.array(prompts[:stop])[known], 1 - 0.05 * (stop - before) / 200)
        if rate[3] < 0.5:
            return stop, rate, "worse"
        if (rate[3] - rate[2]) / 2 <= 0.14:
            return stop, rate, "±0.14"
        before, stop = stop, min(2 * stop, 200)
    return 200, rate, "all 200"


def test_questions_to_the_oracle(measured: tuple[Any, Judge, RLReadinessReport]):
    _, judge, report = measured
    (probe,) = report.probes
    asked, on_policy = judge.asked[:-30], judge.asked[-30:]
    for prompt, first, second in asked:
        rewards = dict(zip(RESPONSES[PROMPTS.index(prompt)], POOL.rewards[PROMPTS.index(prompt)], strict=True))
        assert rewards[first] == max(rewards.values())
        assert first != second
    assert (probe.n, probe.max_questions) == (6, 200)
    wins = np.array([judge.answer(*each) for each in asked])
    stop, rate, reason = looked(wins, [each[0] for each in asked])
    assert (probe.num_questions, probe.num_open) == (stop, int(np.isnan(wins).sum()))
    assert ends(probe.win_rate) == pytest.approx(rate)
    assert ends(report.features["probe_6"]) == ends(probe.win_rate)
    assert reason in probe.stopped
    different = {(each[0], *sorted(each[1:])) for each in asked if np.isfinite(judge.answer(*each))}
    assert probe.num_labels == len(different)
    answers = np.array([judge.answer(*each) for each in on_policy])
    known = np.isfinite(answers) & (answers != 0.5)
    signs = []
    for prompt, first, second in on_policy:
        row = PROMPTS.index(prompt)
        gap = POOL.rewards[row][[RESPONSES[row].index(first), RESPONSES[row].index(second)]] @ [1, -1]
        signs.append(np.sign(gap))
    right = 0.5 + 0.5 * np.array(signs) * np.sign(answers - 0.5)
    expected = clustered(right[known], np.array([each[0] for each in on_policy])[known])
    assert ends(report.features["on_policy_accuracy"]) == pytest.approx(expected)
    more = {(each[0], *sorted(each[1:])) for each in on_policy if np.isfinite(judge.answer(*each))}
    assert report.sample is not None
    counts = (report.sample.num_pairs, report.sample.num_prompts, report.sample.num_responses, report.sample.num_labels)
    assert counts == (KEPT, 9, 6, len(different) + len(more))
    assert (report.algorithm, report.sample.seed) == ("grpo", SEED)


def test_a_gold_reward_is_a_rater_on_its_own_scale_and_the_ceiling(measured: tuple[Any, Judge, RLReadinessReport]):
    model, judge = measured[0], Judge()
    wide = [f"question {i}" for i in range(20)]  # of which the scale reads the first sixteen
    texts = [[f"{i} {'word ' * (j + i % 5)}" for j in range(4)] for i in range(20)]
    pool = ResponsePool(wide, texts, np.random.default_rng(4).normal(size=(20, 4)))
    gold = ScorerOracle(judge, is_exact=True)
    options = ReadinessOptions(**SIZES | {"num_bootstrap": 0})
    found = measure_readiness(model, PreferenceDataset(PAIRS), pool, gold, algorithm="ppo_kl", options=options)
    for name in ("worst_slice_accuracy", "nll", "brier", "reward_spread", "length_correlation"):
        assert found.features[name].low is None, name  # of no resamples
    sides = [(judge.reward(pair.chosen) - judge.reward(pair.rejected), pair.label) for pair in sampled()]
    ceiling = np.mean([0.5 if m == 0 else (m > 0) == (y > 0.5) for m, y in sides if y != 0.5])
    assert ceiling > 0.5
    relative = (found.features["accuracy"].value - 0.5) / (ceiling - 0.5)
    assert found.features["accuracy_relative"].value == pytest.approx(relative)
    alike = ScorerOracle(Alike(), is_exact=True)  # which says nothing of the labels' noise
    bare = measure_readiness(model, PreferenceDataset(PAIRS), None, alike, options=ReadinessOptions(**SIZES))
    assert bare.features["accuracy_relative"].value == pytest.approx(2 * found.features["accuracy"].value - 1)
    scale = math.sqrt(np.mean([np.var([judge.reward(t) for t in row], ddof=1) for row in texts[:16]]))
    before, after = 2 * KEPT + 16 * 4, 2 * 30  # the ceiling and the scale, and the pairs that stand for the policy
    asked = np.array([judge.reward(t) for t in judge.scored[before:-after]]).reshape(-1, 2)
    assert len(asked) == found.probes[0].num_questions
    assert found.features["probe_4"].value == pytest.approx(expit(2 * (asked @ [1, -1]) / scale).mean())


@pytest.mark.parametrize("algorithm", ["bon", "rloo_kl", "grpo"])
def test_the_fitted_score(algorithm: str):
    packaged = files("rm_optimizer.rl_coupling.readiness") / "fitted_v1.json"
    fit = json.loads(packaged.read_text())["outcomes"][algorithm]
    rng, cuts = np.random.default_rng(5), fit["cut_points"]
    for wanted, word in (
        (cuts[0] - 0.05, "not recommended"),
        ((cuts[0] + cuts[1]) / 2, "not recommended"),
        ((cuts[1] + cuts[2]) / 2, "acceptable with monitoring"),
        (cuts[2] + 0.05, "ready"),
    ):
        shift = (wanted - fit["intercept"]) / sum(term["weight"] for term in fit["features"])
        given, value, variance, shares = {}, fit["intercept"], fit["residual_std"] ** 2, {}
        for i, term in enumerate(fit["features"]):
            x, error = term["mean"] + shift * term["std"], float(rng.uniform(0.01, 0.05))
            low = 0.51 if term["name"].startswith("probe") else None
            given[term["name"]] = Estimate(x, error, 40 + i, low, None if low is None else x + 0.1)
            shares[term["name"]] = term["weight"] * (x - term["mean"]) / term["std"]
            variance += (term["weight"] / term["std"] * error) ** 2
        value += sum(shares.values())
        evidence = Evidence(algorithm, given | {"reward_spread": Estimate(0.6, 0.1, 9)}, [], [])
        found = conclude(evidence, fitted_readiness())
        half = stats.norm.ppf(0.975) * math.sqrt(variance)
        assert found.score is not None
        assert ends(found.score) == pytest.approx((value, math.sqrt(variance), value - half, value + half))
        assert found.score.num_samples == 40
        assert found.components == pytest.approx(shares)
        assert found.verdict.value == word


def test_credit_of_steps():
    """The change of the total goes to the last step; an inner assigner reads the new rewards."""

    class Discounted:
        def compute(self, rollouts: Sequence[Any]) -> dict[tuple[str, int], float]:
            return {
                (rollout.id, step.index): sum(0.9 ** (k - i) * s.reward for k, s in enumerate(rollout.steps) if k >= i)
                for rollout in rollouts
                for i, step in enumerate(rollout.steps)
            }

    rewards, score = (1.5, -0.5, 2.0), -0.75
    turns = [("x", "y")] * 3
    totals = {"replace": score, "add": 3.0 + score, "multiply": 3.0 * score}
    totals |= {"weighted": 0.7 * 3.0 + 0.3 * score, "bonus": 3.0 + 0.3 * max(score, 0)}
    for mode, total in totals.items():
        rollout = episode("a", *turns, rewards=rewards, gold=score, rm_score=99.0)
        assigner = RewardModelCreditAssigner(mode, Discounted(), score_key="gold", weight=0.3)
        own = [*rewards[:-1], rewards[-1] + total - 3.0]
        expected = {("a", i): sum(0.9 ** (k - i) * own[k] for k in range(i, 3)) for i in range(3)}
        assert assigner.compute([rollout]) == pytest.approx(expected), mode
