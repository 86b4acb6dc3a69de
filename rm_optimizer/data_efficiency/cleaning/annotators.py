"""Agreement of annotators, and the upper bound on accuracy that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord

_SIMULATED = 200_000
"""Pairs of simulated groups of annotators."""


@dataclass(frozen=True)
class NoiseCeiling(JsonRecord):
    """Agreement of several annotators on the same pairs. Votes for a tie do not count.

    Args:
        num_pairs: pairs with at least two votes.
        agreement: probability that two annotators of a pair give the same answer.
        one_by_others: accuracy of the other annotators' majority at predicting one annotator; a tie counts half. On
            labels that are single votes, a good model may stay below it.
        majority: expected share of pairs whose majority is the same in a second group of equal size.
        vote_ceiling: largest possible accuracy at predicting a vote, that of the true probability of each pair.
        majority_ceiling: largest possible accuracy at predicting the majority, for labels that are majorities.

    The last three come from a Beta-binomial fit of the votes.
    """

    num_pairs: int
    agreement: Estimate
    one_by_others: Estimate
    majority: float
    vote_ceiling: float
    majority_ceiling: float


def noise_ceiling(
    votes_for: Float[np.ndarray, " pairs"],
    votes_against: Float[np.ndarray, " pairs"],
    prompts: Sequence[str],
    *,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> NoiseCeiling:
    """Agreement of annotators over pairs, with intervals over prompts.

    Args:
        votes_for: votes for the first response of each pair.
        votes_against: votes for the other one.
        prompts: prompt of each pair.
        num_bootstrap: resamples of prompts.
        seed: seed of the resamples, and of the simulated second group.

    Raises:
        DataError: if no pair has two votes.
    """
    total = votes_for + votes_against
    kept = total >= 2
    if not kept.any():
        raise DataError("agreement needs pairs with at least two votes, but there is none")
    yes, no, both = votes_for[kept], votes_against[kept], total[kept]
    agreement = (yes * (yes - 1) + no * (no - 1)) / (both * (both - 1))
    right = (yes * _majority(yes - 1 - no) + no * _majority(no - 1 - yes)) / both
    columns = np.stack([agreement, right, np.ones(len(both))], axis=1)
    names = [prompt for prompt, is_kept in zip(prompts, kept, strict=True) if is_kept]

    def ratios(totals: np.ndarray) -> np.ndarray:
        return np.asarray(totals[..., :2] / totals[..., 2:])

    found = cluster_bootstrap(cluster_totals(columns, names), ratios, num_bootstrap=num_bootstrap, seed=seed)
    return NoiseCeiling(int(kept.sum()), found[0], found[1], *_simulated(both, _beta_size(yes, both), seed))


def _majority(lead: np.ndarray) -> np.ndarray:
    """Accuracy of the others' majority at an annotator's answer, by their lead for it; one half if they are split."""
    return np.asarray(0.5 + 0.5 * np.sign(lead))


def _simulated(both: np.ndarray, spread: float, seed: int) -> tuple[float, float, float]:
    """Share of repeated majorities and the ceilings for votes and majorities, simulated from Beta(spread, spread).

    A split of the votes counts half.
    """
    generator = np.random.default_rng([seed, 5])
    chances = generator.beta(spread, spread, size=(max(1, _SIMULATED // len(both)), len(both)))
    first, second = (np.sign(2 * generator.binomial(both.astype(int), chances) - both) for _ in range(2))
    known = np.sign(chances - 0.5)
    vote = np.average(np.maximum(chances, 1 - chances).mean(axis=0), weights=both)
    return float(_majority(first * second).mean()), float(vote), float(_majority(first * known)[first != 0].mean())


def _beta_size(yes: np.ndarray, both: np.ndarray) -> float:
    """Parameter a of Beta(a, a) from the agreement of two votes, which it makes ``(a + 1) / (2 a + 1)``.

    The order of the responses has no meaning, so the distribution is symmetric.
    """
    agreement = float((yes * (yes - 1) + (both - yes) * (both - yes - 1)).sum() / (both * (both - 1)).sum())
    agreement = min(max(agreement, 0.5 + 1e-6), 1 - 1e-6)
    return (1 - agreement) / (2 * agreement - 1)
