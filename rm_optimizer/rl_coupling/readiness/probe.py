"""Best-of-n probe on responses of a policy, stopped when it is decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.core.metrics.intervals import clustered_share
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling.readiness.features import ProbeQuestions, probe_questions
from rm_optimizer.rl_coupling.readiness.oracle import Oracle
from rm_optimizer.rl_coupling.readiness.pool import ResponsePool
from rm_optimizer.rl_coupling.readiness.report import ProbeRecord


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
        if not 0 < self.precision < 0.5:
            raise ConfigError(f"precision of the probe must lie in (0, 0.5), got {self.precision:g}")

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


def planned_questions(pool: ResponsePool, n: int, rule: StoppingRule, *, seed: int) -> ProbeQuestions:
    """All questions that a probe may ask, in order."""
    return probe_questions(pool.rewards, n, rule.max_questions, seed=seed)


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
    asked = planned_questions(pool, n, rule, seed=seed)
    wins, stopped, rate = np.zeros(0), None, None
    for stop, confidence in rule.looks():
        part = slice(len(wins), stop)
        found = pool.compared(oracle, asked.prompt[part], asked.pick[part], asked.other[part])
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
    done = slice(len(wins))
    num_labels = pool.num_labels(wins, asked.prompt[done], asked.pick[done], asked.other[done])
    num_open = int((~np.isfinite(wins)).sum())
    whole = f"all {rule.max_questions} questions are asked"
    return ProbeRecord(n, rate, len(wins), num_labels, num_open, rule.max_questions, stopped or whole)
