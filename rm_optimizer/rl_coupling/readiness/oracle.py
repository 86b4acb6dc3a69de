"""Oracles of the probe: what says which of two responses is the better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, Scorer, prompt_id
from rm_optimizer.errors import DataError


class Oracle(Protocol):
    """Anything that compares responses: a gold reward, another reward model, or answers of people."""

    def prefer(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> Float[np.ndarray, " questions"]:
        """Probability that the first response to each prompt is the better one; NaN where there is no answer."""
        ...


class ScorerOracle:
    """Oracle that prefers the response of the higher reward, ties one half.

    Args:
        scorer: a gold reward, or a reward model that shares no training pairs with the one in question.
        is_exact: True for a gold reward; its accuracy on labeled pairs is then the ceiling of any model's.
    """

    def __init__(self, scorer: Scorer, *, is_exact: bool = False) -> None:
        self._scorer = scorer
        self.is_exact = is_exact

    def prefer(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> Float[np.ndarray, " questions"]:
        """1, 0.5 or 0.

        Raises:
            DataError: if a reward is not finite.
        """
        groups = self._scorer.score_groups(prompts, list(zip(first, second, strict=True)))
        margin = np.array([float(rewards[0] - rewards[1]) for rewards in groups])
        if not np.isfinite(margin).all():
            raise DataError("the oracle gives rewards that are not finite; choose another with --gold")
        return np.asarray(0.5 + 0.5 * np.sign(margin))


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
