"""Votes of several annotators on one pair: their agreement, and a comparison with a model's probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.special import log_expit

from rm_optimizer.core.metrics.calibration import (
    ReliabilityBin,
    equal_mass_bins,
    expected_calibration_error,
    fit_temperature,
    fold,
    reliability_curve,
)
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, ratios
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.natural import Texts, texts
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
        vote_ceiling: largest possible accuracy at predicting a vote, by the true probability of each pair.
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
    prompts: Texts,
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
        raise DataError("agreement needs pairs with at least two votes, got none")
    yes, no, both = votes_for[kept], votes_against[kept], total[kept]
    same, couples = yes * (yes - 1) + no * (no - 1), both * (both - 1)
    right = (yes * _majority(yes - 1 - no) + no * _majority(no - 1 - yes)) / both
    columns = np.stack([same / couples, right, np.ones(len(both))], axis=1)
    names = [prompt for prompt, is_kept in zip(texts("prompts", prompts), kept, strict=True) if is_kept]

    found = cluster_bootstrap(cluster_totals(columns, names), ratios, num_bootstrap=num_bootstrap, seed=seed)
    # Two votes agree with probability (a + 1) / (2 a + 1) if the chances are Beta(a, a), which is symmetric, since the
    # order of the responses has no meaning.
    agreed = min(max(float(same.sum() / couples.sum()), 0.5 + 1e-6), 1 - 1e-6)
    spread = (1 - agreed) / (2 * agreed - 1)
    generator = np.random.default_rng([seed, 5])
    chances = generator.beta(spread, spread, size=(max(1, _SIMULATED // len(both)), len(both)))
    first, second = (np.sign(2 * generator.binomial(both.astype(int), chances) - both) for _ in range(2))
    known = np.sign(chances - 0.5)
    return NoiseCeiling(
        num_pairs=int(kept.sum()),
        agreement=found[0],
        one_by_others=found[1],
        majority=float(_majority(first * second).mean()),  # a split of the votes counts half
        vote_ceiling=float(np.average(np.maximum(chances, 1 - chances).mean(axis=0), weights=both)),
        majority_ceiling=float(_majority(first * known)[first != 0].mean()),
    )


def _majority(lead: np.ndarray) -> np.ndarray:
    """Accuracy of the others' majority at an annotator's answer, by their lead for it.

    It is one half if they are split.
    """
    return np.asarray(0.5 + 0.5 * np.sign(lead))


COLUMNS = ("votes_chosen", "votes_rejected")
"""Columns with the number of votes for each side of a pair. Votes for a tie do not count."""


@dataclass(frozen=True)
class Votes:
    """Votes of the pairs that have votes.

    Args:
        positions: positions of these pairs among all.
        chosen: votes for the chosen response of each pair.
        rejected: votes for the rejected response.
        prompts: prompt of each pair.
    """

    positions: Int[np.ndarray, " pairs"]
    chosen: Float[np.ndarray, " pairs"]
    rejected: Float[np.ndarray, " pairs"]
    prompts: tuple[str, ...]

    @property
    def ceiling(self) -> NoiseCeiling | None:
        """Agreement of the annotators; None if no pair has two votes."""
        if not (self.chosen + self.rejected >= 2).any():
            return None
        return noise_ceiling(self.chosen, self.rejected, self.prompts)


@dataclass(frozen=True)
class VoteCalibration(JsonRecord, indent=1):
    """Comparison of a model's probabilities with the votes of annotators.

    Args:
        num_pairs: number of pairs with votes for a side.
        num_votes: number of votes for a side.
        vote_accuracy: probability that a vote is for the side that the model prefers, model ties one half.
        majority_accuracy: accuracy at predicting the majority of votes; pairs without a majority are left out.
        vote_nll: mean NLL of a vote, in nats.
        ece: expected calibration error of the probability against the share of votes, weighted by votes.
        correlation: correlation of probability and share of votes, each pair seen from both sides.
        temperature: temperature that fits the probabilities to the votes; None if no temperature fits.
        bins: share of votes by probability.
        ceiling: agreement of the annotators; None if no pair has two votes.
    """

    num_pairs: int
    num_votes: int
    vote_accuracy: Estimate
    majority_accuracy: Estimate
    vote_nll: Estimate
    ece: float
    correlation: float
    temperature: float | None
    bins: tuple[ReliabilityBin, ...]
    ceiling: NoiseCeiling | None


def votes_of(pairs: Sequence[PreferencePair]) -> Votes | None:
    """Votes in the columns `votes_chosen` and `votes_rejected` of the pairs.

    It is None if no pair has votes.

    Raises:
        DataError: if a number of votes is negative or not a number.
    """
    rows = []
    for place, pair in enumerate(pairs):
        given = [pair.metadata.get(column) for column in COLUMNS]
        if any(votes is None for votes in given):
            continue
        try:
            counts = [float(votes) for votes in given if votes is not None]
        except (TypeError, ValueError):
            counts = [-1.0]
        if not all(0 <= votes < np.inf for votes in counts):
            raise DataError(
                f"pair {place + 1} has {given[0]!r} and {given[1]!r} in {' and '.join(COLUMNS)}; expected numbers of "
                "votes, 0 or more; correct the row, or rename the columns if they hold no votes"
            )
        if sum(counts) > 0:
            rows.append((place, *counts, pair.prompt_id))
    if not rows:
        return None
    places, chosen, rejected, prompts = zip(*rows, strict=True)
    return Votes(np.array(places), np.array(chosen), np.array(rejected), prompts)


def vote_calibration(
    margins: Float[np.ndarray, " pairs"], votes: Votes, *, beta: float = 1.0, num_bootstrap: int = 1000, seed: int = 0
) -> VoteCalibration:
    """Compare a model's probabilities with votes; intervals resample prompts.

    Args:
        margins: reward of the chosen response less the reward of the other, for the pairs with votes.
        votes: votes of these pairs.
        beta: inverse temperature of the preference probability.
        num_bootstrap: resamples of prompts.
        seed: seed of the resamples.
    """
    logit, total = beta * margins, votes.chosen + votes.rejected
    share = votes.chosen / total
    agree = np.where(margins > 0, votes.chosen, np.where(margins < 0, votes.rejected, total / 2))
    lead = votes.chosen - votes.rejected
    right = np.where(lead == 0, 0.0, 0.5 + 0.5 * np.sign(lead) * np.sign(margins))
    nll = -votes.chosen * log_expit(logit) - votes.rejected * log_expit(-logit)

    def means(*columns: np.ndarray) -> tuple[Estimate, ...]:
        """Each column over the last one, over the prompts in which that counts."""
        sums = cluster_totals(np.stack(columns, axis=1), votes.prompts)
        return cluster_bootstrap(sums[sums[:, -1] > 0], ratios, num_bootstrap=num_bootstrap, seed=seed)

    vote_accuracy, vote_nll = means(agree, nll, total)
    folded = fold(logit, share, total)
    centered, voted = np.tanh(logit / 2), 2 * share - 1  # twice the distances of probability and share from one half
    spread = np.sqrt((total * centered**2).sum() * (total * voted**2).sum())
    return VoteCalibration(
        num_pairs=len(total),
        num_votes=int(total.sum()),
        vote_accuracy=vote_accuracy,
        majority_accuracy=means(right, (lead != 0).astype(np.float64))[0],
        vote_nll=vote_nll,
        ece=expected_calibration_error(folded, equal_mass_bins(folded.confidence, folded.weight)),
        correlation=float((total * centered * voted).sum() / spread) if spread > 0 else float("nan"),
        temperature=fit_temperature(logit, share, total).temperature,
        bins=reliability_curve(folded),
        ceiling=votes.ceiling,
    )
