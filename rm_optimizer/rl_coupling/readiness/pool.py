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

    def compared(
        self,
        oracle: Oracle,
        prompt: Int[np.ndarray, " questions"],
        first: Int[np.ndarray, " questions"],
        second: Int[np.ndarray, " questions"],
    ) -> tuple[Float[np.ndarray, " questions"], int]:
        """Answers of an oracle, NaN where there is none, and how many were asked for; equal texts tie unasked.

        Raises:
            DataError: if an answer is not in [0, 1].
        """
        texts = [(self.responses[p][a], self.responses[p][b]) for p, a, b in zip(prompt, first, second, strict=True)]
        asked = np.flatnonzero([one != other for one, other in texts])
        wins = np.full(len(texts), 0.5)
        if len(asked):
            prompts = [self.prompts[prompt[place]] for place in asked]
            sides = [texts[place] for place in asked]
            wins[asked] = oracle.prefer(prompts, [one for one, _ in sides], [other for _, other in sides])
        if (wins < 0).any() or (wins > 1).any():
            raise DataError("an oracle's answer must lie in [0, 1], the probability that the first response is better")
        return wins, int(np.isfinite(wins[asked]).sum())
