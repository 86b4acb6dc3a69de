"""The probe asks as few questions as its rule allows, and its interval holds wherever it stops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling.policy_simulation import RankedResponses
from rm_optimizer.rl_coupling.readiness.probe import (
    Comparisons,
    ResponsePool,
    ScorerOracle,
    StoppingRule,
    probe_questions,
    run_probe,
)


class ByWord(Scorer):
    """Scorer of the number that ends a text, or of a property of it."""

    def __init__(self, reward=lambda text: float(text.split()[-1])):
        self.reward = reward

    def score(self, prompts, responses):
        return torch.tensor([self.reward(text) for text in responses])


class Noisy:
    """Oracle that prefers the pick with the chance of its prompt."""

    def __init__(self, chance, rng):
        self.chance, self.rng = chance, rng

    def prefer(self, prompts, first, second):
        rows = [int(prompt.split()[1]) for prompt in prompts]
        return (self.rng.random(len(rows)) < self.chance[rows]).astype(float)


def pool_of(rewards):
    texts = [[f"response {number}" for number in row] for row in rewards]
    return ResponsePool([f"prompt {row}" for row in range(len(rewards))], texts, np.array(rewards))


POOL = pool_of(np.random.default_rng(5).normal(size=(64, 8)))


def test_a_perfect_model_is_decided_early():
    pool = pool_of(np.random.default_rng(0).permuted(np.tile(np.arange(16.0), (64, 1)), axis=1))
    record = run_probe(pool, ScorerOracle(ByWord()), 16, StoppingRule(), seed=0)
    assert record.win_rate.value == 1.0
    assert (record.num_questions, record.num_labels) == (128, 126)
    assert record.stopped == "the interval is within ±0.05"


def test_a_reversed_model_stops_at_the_first_look():
    pool = pool_of(np.random.default_rng(0).permuted(np.tile(np.arange(16.0), (64, 1)), axis=1))
    record = run_probe(pool, ScorerOracle(ByWord(lambda text: -float(text.split()[-1]))), 16, StoppingRule(), seed=0)
    assert (record.num_questions, record.win_rate.value) == (32, 0.0)
    assert "worse than other responses" in record.stopped


def test_a_rater_errs_where_responses_are_close_and_by_the_oracles_own_scale():
    prompts, texts = ["p", "q"], [["a 0", "b 2"], ["c 10", "d 12"]]
    for factor in (1.0, 50.0):
        oracle = ScorerOracle(ByWord(lambda text, factor=factor: factor * float(text.split()[-1])))
        rater = oracle.as_rater(prompts, texts)
        assert rater.prefer(["p"] * 3, ["b 2", "a 0", "a 1"], ["a 0", "b 2", "b 1"]) == pytest.approx(
            [1 / (1 + np.exp(-2 * 2**0.5)), 1 / (1 + np.exp(2 * 2**0.5)), 0.5]
        )
    constant = ScorerOracle(ByWord(lambda text: 1.0)).as_rater(prompts, texts)
    assert constant.prefer(["p"], ["a"], ["b"]) == [0.5]


def test_equal_texts_tie_without_a_label():
    pool = ResponsePool(["a", "b"], [["same"] * 4] * 2, np.zeros((2, 4)))
    record = run_probe(pool, Comparisons([]), 4, StoppingRule(32), seed=0)
    assert (record.num_labels, record.win_rate.value) == (0, 0.5)


@pytest.mark.parametrize("truth", [0.5, 0.62, 0.8, 0.95])
def test_interval_covers_the_truth_wherever_the_probe_stops(truth):
    rng = np.random.default_rng(int(100 * truth))
    covered, stops = 0, set()
    for _ in range(300):
        chance = np.clip(truth + 0.1 * rng.uniform(-1, 1, size=64) * min(1, 10 * (1 - truth)), 0, 1)

        record = run_probe(POOL, Noisy(chance, rng), 8, StoppingRule(), seed=int(rng.integers(1000)))
        covered += record.win_rate.low <= truth <= record.win_rate.high
        stops.add(record.num_questions)
    assert covered / 300 >= 0.95 - 2 * 0.0126  # two standard errors of 300 probes


def test_answers_of_people_are_found_whichever_side_they_stood_on():
    pool, rule = POOL, StoppingRule(40, 20)
    asked = probe_questions(pool.rewards, 8, rule.max_questions, seed=3)
    pairs = []
    for place, (row, pick, other) in enumerate(zip(asked.prompt, asked.pick, asked.other, strict=True)):
        sides = (pool.responses[row][pick], pool.responses[row][other])
        turned = place % 2
        pairs.append(
            PreferencePair(pool.prompts[row], *(sides[::-1] if turned else sides), label=0.0 if turned else 1.0)
        )
    whole = run_probe(pool, Comparisons(pairs), 8, rule, seed=3)
    assert (whole.win_rate.value, whole.num_open) == (1.0, 0)
    part = run_probe(pool, Comparisons(pairs[:12]), 8, rule, seed=3)
    assert (part.num_labels, part.num_open, part.num_questions) == (12, 8, 20)
    assert part.stopped == "there are no further answers"
    with pytest.raises(DataError, match="answers none of the first 20 questions"):
        run_probe(pool, Comparisons([]), 8, rule, seed=3)


def test_errors_of_all_looks_add_up_to_five_percent():
    for rule in (StoppingRule(), StoppingRule(100, 30), StoppingRule(10, 32)):
        assert sum(1 - confidence for _, confidence in rule.looks()) == pytest.approx(0.05)
        assert [stop for stop, _ in rule.looks()][-1] == rule.max_questions


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: StoppingRule(0), ConfigError, "at least 1 question"),
        (lambda: StoppingRule(precision=0.5), ConfigError, r"must lie in \(0, 0.5\), got 0.5"),
        (lambda: ResponsePool.of([]), DataError, "at least 2 prompts"),
        (
            lambda: ResponsePool.of([RankedResponses("p", ("a",), (1.0,), (0,))] * 2),
            DataError,
            "at least 2 to each; got 2 prompts with 1 to 1 responses",
        ),
        (lambda: ScorerOracle(ByWord(lambda text: float("nan"))).prefer(["p"], ["a"], ["b"]), DataError, "not finite"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_a_sentence(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
