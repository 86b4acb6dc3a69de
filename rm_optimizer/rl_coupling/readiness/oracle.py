"""Oracles of the probe: what says which of two responses is the better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float
from scipy.special import expit

from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, Scorer, prompt_id
from rm_optimizer.errors import DataError

RATER_BETA = 2.0
"""Inverse temperature of raters, per standard deviation of the reward within prompts."""


class Oracle(Protocol):
    """Anything that compares responses: a gold reward, another reward model, or answers of people."""

    def prefer(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> Float[np.ndarray, " questions"]:
        """Probability that the first response to each prompt is the better one; NaN where there is no answer."""
        ...


class ScorerOracle:
    """Oracle by rewards: without a scale it prefers the higher one, with one it answers as a rater does.

    A rater prefers the first response with probability `sigmoid(2 (r_1 - r_2) / scale)`, as those of the validating
    study do (`RATER_BETA`). A probe then means what it meant there.

    Args:
        scorer: a gold reward, or a reward model that shares no training pairs with the one in question.
        is_exact: True for a gold reward; its accuracy on labeled pairs is then the ceiling of any model's.
        scale: standard deviation of the rewards within prompts, positive; None compares without noise.
    """

    def __init__(self, scorer: Scorer, *, is_exact: bool = False, scale: float | None = None) -> None:
        self._scorer = scorer
        self.is_exact = is_exact
        self._scale = scale

    def as_rater(self, prompts: Sequence[Prompt], responses_of_each: Sequence[Sequence[str]]) -> ScorerOracle:
        """The oracle with its scale on these responses; without one where it tells none of them apart."""
        groups = self._scorer.score_groups(prompts, responses_of_each)
        variance = float(np.mean([rewards.double().var(correction=1).item() for rewards in groups]))
        scale = math.sqrt(variance) if variance > 0 else None
        return ScorerOracle(self._scorer, is_exact=self.is_exact, scale=scale)

    def prefer(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> Float[np.ndarray, " questions"]:
        """Probability that the first response is preferred; 1, 0.5 or 0 without a scale.

        Raises:
            DataError: if a reward is not finite.
        """
        groups = self._scorer.score_groups(prompts, list(zip(first, second, strict=True)))
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
        self._answers = {
            key: chance
            for pair in pairs
            for key, chance in (
                ((pair.prompt_id, pair.chosen, pair.rejected), pair.label),
                ((pair.prompt_id, pair.rejected, pair.chosen), 1 - pair.label),
            )
        }

    def prefer(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> Float[np.ndarray, " questions"]:
        """The answers, NaN where a question was not answered."""
        keys = zip(map(prompt_id, prompts), first, second, strict=True)
        return np.array([self._answers.get(key, math.nan) for key in keys])
