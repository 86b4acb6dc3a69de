"""Pool of a policy's responses, with the rewards of the model in question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.errors import DataError
from rm_optimizer.rl_coupling.policy_simulation import RankedResponses
from rm_optimizer.rl_coupling.readiness.oracle import Oracle


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

    def texts(self, prompt: Int[np.ndarray, " questions"], column: Int[np.ndarray, " questions"]) -> list[str]:
        """Response of each question."""
        return [self.responses[row][place] for row, place in zip(prompt, column, strict=True)]

    def compared(
        self,
        oracle: Oracle,
        prompt: Int[np.ndarray, " questions"],
        first: Int[np.ndarray, " questions"],
        second: Int[np.ndarray, " questions"],
    ) -> Float[np.ndarray, " questions"]:
        """Answers of an oracle, NaN where there is none; equal texts tie unasked.

        Raises:
            DataError: if an answer is not in [0, 1].
        """
        sides = self.texts(prompt, first), self.texts(prompt, second)
        asked = [place for place, (one, other) in enumerate(zip(*sides, strict=True)) if one != other]
        wins = np.full(len(prompt), 0.5)
        if asked:
            chosen = [[side[place] for place in asked] for side in sides]
            wins[asked] = oracle.prefer([self.prompts[prompt[place]] for place in asked], *chosen)
        if (wins < 0).any() or (wins > 1).any():
            raise DataError("an oracle's answer must lie in [0, 1], the probability that the first response is better")
        return wins

    def num_labels(
        self,
        wins: Float[np.ndarray, " questions"],
        prompt: Int[np.ndarray, " questions"],
        first: Int[np.ndarray, " questions"],
        second: Int[np.ndarray, " questions"],
    ) -> int:
        """Different questions among those that the oracle answered; equal texts are none."""
        sides = zip(wins, prompt, self.texts(prompt, first), self.texts(prompt, second), strict=True)
        return len({(row, *sorted(both)) for win, row, *both in sides if np.isfinite(win) and both[0] != both[1]})
