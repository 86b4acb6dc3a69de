"""Best-of-n probe: a pool of a policy's responses, oracles that compare them, and the rule that stops the questions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, finite_array
from rm_optimizer.core.metrics.intervals import clustered_share
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, prompt_id
from rm_optimizer.core.rows.natural import Prompts, Texts, prompts_of, texts
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling.policy_simulation import RankedResponses
from rm_optimizer.rl_coupling.readiness.report import ProbeRecord
from rm_optimizer.schema.checks import require

RATER_BETA = 2.0
"""Inverse temperature of raters, per standard deviation of the reward within prompts."""


Answers = Float[np.ndarray, " questions"]
"""Probability that the first response to each prompt is the better one; NaN without an answer."""


class Oracle(Protocol):
    """Anything that compares responses: a gold reward, another reward model, or answers of people."""

    def prefer(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> Answers:
        """Probability that the first response to each prompt is the better one; NaN without an answer."""
        ...


class ScorerOracle:
    """Oracle by rewards: without a scale it prefers the higher one, with one it answers as a rater does.

    A rater prefers the first response with probability `sigmoid(2 (r_1 - r_2) / scale)`, as the validating study's
    raters do (`RATER_BETA`). A probe then means what it meant there.

    Args:
        scorer: a gold reward, or a reward model that shares no training pairs with the one in question.
        is_exact: True for a gold reward; its accuracy on labeled pairs is then the ceiling of any model's.
        scale: standard deviation of the rewards within prompts, positive; None compares without noise.
    """

    def __init__(self, scorer: Scorer, *, is_exact: bool = False, scale: float | None = None) -> None:
        self._scorer = scorer
        self.is_exact = is_exact
        self._scale = scale

    def as_rater(self, prompts: Prompts, responses_of_each: Iterable[Texts]) -> ScorerOracle:
        """The oracle with its scale on these responses; without one if all their rewards are equal."""
        groups = self._scorer.score_groups(prompts, responses_of_each)
        variance = float(np.mean([rewards.double().var(correction=1).item() for rewards in groups]))
        scale = math.sqrt(variance) if variance > 0 else None
        return ScorerOracle(self._scorer, is_exact=self.is_exact, scale=scale)

    def prefer(self, prompts: Prompts, first: Texts, second: Texts) -> Answers:
        """Probability that the first response is preferred; 1, 0.5 or 0 without a scale.

        Raises:
            DataError: if a reward is not finite.
        """
        both = zip(texts("first", first), texts("second", second), strict=True)
        groups = self._scorer.score_groups(prompts_of("prompts", prompts), list(both))
        margin = np.array([float(rewards[0] - rewards[1]) for rewards in groups])
        if not np.isfinite(margin).all():
            raise DataError("the oracle gives rewards that are not finite; choose another with --gold")
        if self._scale is None:
            return np.asarray(0.5 + 0.5 * np.sign(margin))
        return np.asarray(expit(RATER_BETA * margin / self._scale))


class Comparisons:
    """Oracle of comparisons that were made already, by people as a rule.

    Args:
        pairs: answered questions, `label` being the probability that `chosen` is the better response.
    """

    def __init__(self, pairs: Iterable[PreferencePair]) -> None:
        self._answers: dict[tuple[str, str, str], float] = {}
        for pair in pairs:
            self._answers[pair.prompt_id, pair.chosen, pair.rejected] = pair.label
            self._answers[pair.prompt_id, pair.rejected, pair.chosen] = 1 - pair.label

    def prefer(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> Answers:
        """The answers, NaN where a question was not answered."""
        keys = zip(map(prompt_id, prompts), first, second, strict=True)
        return np.array([self._answers.get(key, math.nan) for key in keys])


@dataclass(frozen=True)
class ProbeQuestions:
    """Comparisons of a reward model's pick, or of any response, with another response to the same prompt.

    Args:
        prompt: row of each question's prompt.
        pick: column of the response that the reward model picks.
        other: column of the response that the pick is compared with.
    """

    prompt: Int[np.ndarray, " questions"]
    pick: Int[np.ndarray, " questions"]
    other: Int[np.ndarray, " questions"]

    def __getitem__(self, part: slice) -> ProbeQuestions:
        """Adjacent questions."""
        return ProbeQuestions(self.prompt[part], self.pick[part], self.other[part])


@dataclass(frozen=True)
class ResponsePool:
    """Equally many responses to each prompt.

    Args:
        prompts: text or messages.
        responses: responses to each prompt.
        rewards: their rewards.
    """

    prompts: Sequence[Prompt]
    responses: Sequence[Sequence[str]]
    rewards: Float[np.ndarray, "prompts samples"]

    @classmethod
    def of(cls, ranked: Sequence[RankedResponses]) -> ResponsePool:
        """The pool of ranked responses.

        Raises:
            DataError: if prompts differ in their number of responses, or there are fewer than two of either.
        """
        counts = sorted({len(row.responses) for row in ranked})
        if len(ranked) < 2 or len(counts) != 1 or counts[0] < 2:
            sizes = f"{counts[0]} to {counts[-1]} responses" if counts else "none"
            raise DataError(
                "readiness needs at least 2 prompts with equally many responses, at least 2 to each; got "
                f"{len(ranked)} prompts with {sizes}"
            )
        return cls(
            [row.prompt for row in ranked], [row.responses for row in ranked], np.array([r.rewards for r in ranked])
        )

    @property
    def lengths(self) -> Float[np.ndarray, "prompts samples"]:
        """Characters of each response."""
        return np.array([[float(len(text)) for text in texts] for texts in self.responses])

    def sides(self, asked: ProbeQuestions) -> tuple[list[str], list[str]]:
        """Both responses of each question."""
        both = [
            (self.responses[row][pick], self.responses[row][other])
            for row, pick, other in zip(asked.prompt, asked.pick, asked.other, strict=True)
        ]
        return [pick for pick, _ in both], [other for _, other in both]

    def compared(self, oracle: Oracle, asked: ProbeQuestions) -> Answers:
        """Answers of an oracle, NaN without an answer; equal texts tie unasked.

        Raises:
            DataError: if an answer is not in [0, 1].
        """
        picks, others = self.sides(asked)
        open_ones = [place for place, pick in enumerate(picks) if pick != others[place]]
        wins = np.full(len(picks), 0.5)
        if open_ones:
            prompts = [self.prompts[asked.prompt[place]] for place in open_ones]
            wins[open_ones] = oracle.prefer(
                prompts, [picks[place] for place in open_ones], [others[place] for place in open_ones]
            )
        if (wins < 0).any() or (wins > 1).any():
            raise DataError("an oracle's answer must lie in [0, 1], the probability that the first response is better")
        return wins

    def num_labels(self, wins: Answers, asked: ProbeQuestions) -> int:
        """Number of different questions that the oracle answered; equal texts do not count."""
        rows = zip(wins, asked.prompt, *self.sides(asked), strict=True)
        return len({(row, *sorted(both)) for win, row, *both in rows if np.isfinite(win) and both[0] != both[1]})


@dataclass(frozen=True)
class StoppingRule:
    """Looks at the win rate after fixed numbers of questions, which together err in 5 % of all probes at most.

    Looks come after `first_look` questions, twice as many, and so on up to `max_questions`. A look after a share t of
    all questions has spent `0.05 t` of the error (linear spending; Lan & DeMets, 1983,
    https://doi.org/10.1093/biomet/70.3.659), each look its own increment. By the union bound the interval at
    whichever look the probe stops holds the truth with 95 %, however the looks depend on each other.

    Args:
        max_questions: most questions, positive.
        first_look: questions before the first look, positive.
        precision: half width of the interval at which the probe stops, in (0, 0.5).

    Raises:
        ConfigError: if a number is out of its range.
    """

    max_questions: int = 256
    first_look: int = 32
    precision: float = 0.05

    def __post_init__(self) -> None:
        if self.max_questions < 1 or self.first_look < 1:
            raise ConfigError(f"the probe needs at least 1 question, got {min(self.max_questions, self.first_look)}")
        require(0 < self.precision < 0.5, "precision of the probe", "lie in (0, 0.5)", f"{self.precision:g}")

    def looks(self) -> Iterator[tuple[int, float]]:
        """Questions of each look, and the confidence of its interval.

        Example:
            >>> [(n, round(1 - c, 5)) for n, c in StoppingRule(128).looks()]
            [(32, 0.0125), (64, 0.0125), (128, 0.025)]
        """
        before, stop = 0, min(self.first_look, self.max_questions)
        while before < self.max_questions:
            yield stop, 1 - (1 - CONFIDENCE) * (stop - before) / self.max_questions
            before, stop = stop, min(2 * stop, self.max_questions)

    def reason(self, rate: Estimate) -> str | None:
        """Reason to stop at this look; None to go on."""
        if rate.low is None or rate.high is None:
            return None
        if rate.high < 0.5:
            return "the picks are worse than other responses"
        if (rate.high - rate.low) / 2 <= self.precision:
            return f"the interval is within ±{self.precision:g}"
        return None


def probe_questions(
    proxy: Float[np.ndarray, "prompts samples"], n: int, num_questions: int, *, seed: int
) -> ProbeQuestions:
    """Draw questions of the best-of-n probe, in the order in which they are asked.

    A question takes n responses of a prompt's pool at random. Its pick has the highest proxy reward among them, ties at
    random. It is compared with a random other response of the whole pool. Prompts come in rounds of all prompts in
    random order, so that every beginning of the questions is a balanced sample.

    Args:
        proxy: rewards of the model in question.
        n: responses to pick from, in 1 … samples.
        num_questions: questions, positive.
        seed: seed of the draw.

    Raises:
        ConfigError: if n or the number of questions is out of range.
        DataError: if a pool has fewer than two responses, or a reward is not finite.
    """
    pool = finite_array(proxy, "rewards", ["prompt", "sample"])
    num_prompts, num_samples = pool.shape
    if num_samples < 2:
        raise DataError("the probe compares responses of one prompt; draw at least 2 to each prompt")
    expected = f"lie in 1 … {num_samples}, the responses to each prompt"
    require(1 <= n <= num_samples, "n of the probe", expected, n)
    require(num_questions >= 1, "num_questions", "be positive", num_questions)
    rng = np.random.default_rng([seed, n])
    rounds = [rng.permutation(num_prompts) for _ in range(-(-num_questions // num_prompts))]
    prompt = np.concatenate(rounds)[:num_questions]
    drawn = rng.random((num_questions, num_samples)).argsort(axis=1)[:, :n]
    best = pool[prompt[:, None], drawn].argmax(axis=1)
    pick = drawn[np.arange(num_questions), best]
    other = rng.integers(num_samples - 1, size=num_questions)
    return ProbeQuestions(prompt, pick, other + (other >= pick))


def run_probe(pool: ResponsePool, oracle: Oracle, n: int, rule: StoppingRule, *, seed: int) -> ProbeRecord:
    """Ask the oracle whether the model's best of n beats another response, until the rule stops.

    Args:
        pool: responses of the policy with the model's rewards.
        oracle: compares two responses.
        n: responses among which the model picks, in 1 … samples.
        rule: rule of stopping.
        seed: seed of the questions.

    Raises:
        DataError: if the oracle answers none of the questions of the first look.
    """
    asked = probe_questions(pool.rewards, n, rule.max_questions, seed=seed)
    wins, stopped, rate = np.zeros(0), None, None
    for stop, confidence in rule.looks():
        found = pool.compared(oracle, asked[len(wins) : stop])
        if not np.isfinite(found).any():
            stopped = "there are no further answers"
            break
        wins = np.concatenate([wins, found])
        known = np.isfinite(wins)
        rate = clustered_share(wins[known], asked.prompt[:stop][known], confidence=confidence)
        if (stopped := rule.reason(rate)) is not None:
            break
    if rate is None:
        raise DataError(
            f"the oracle answers none of the first {min(rule.first_look, rule.max_questions)} questions; "
            "are the comparisons of this model, policy, prompts and seed?"
        )
    num_labels = pool.num_labels(wins, asked[: len(wins)])
    num_open = int((~np.isfinite(wins)).sum())
    whole = f"all {rule.max_questions} questions are asked"
    return ProbeRecord(n, rate, len(wins), num_labels, num_open, rule.max_questions, stopped or whole)
