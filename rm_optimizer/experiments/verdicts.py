"""Verdicts on trained arms against a reference arm, over common seeds and prompts.

One score is primary. Its tests are corrected for the number of challengers, and it alone decides. The other scores are
exploratory, and their tests are not corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.effects import (
    ERROR_RATE,
    SCORES,
    Outcome,
    PairedScores,
    Score,
    detectable_effect,
    holm_adjusted,
    power,
)
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import StudentMean
from rm_optimizer.errors import ConfigError, require_known
from rm_optimizer.records.codec import JsonRecord

MARGINS: Mapping[Score, float] = {"accuracy": 0.01, "nll": 0.005, "brier": 0.0025, "ece": 0.01}
"""Differences that do not matter: 0.01 in accuracy, and approximately the same in terms of the other scores."""


@dataclass(frozen=True, kw_only=True)
class Verdict(JsonRecord):
    """Outcome of an arm against the reference in one score.

    Args:
        arm: name of the challenger.
        reference: name of the arm that it is compared with.
        score: compared metric.
        is_primary: True for the one score whose tests are corrected for the number of challengers.
        num_seeds: number of seeds of both arms.
        difference: the challenger's score minus the reference's, with its 95 % interval over seeds and prompts.
        p_value: two-sided p-value against no difference.
        holm_p: `p_value` after Holm's correction over challengers; None for an exploratory score.
        margin: difference that does not matter.
        equivalence_p: p-value against a difference of at least the margin, from two one-sided tests; for the primary
            score after Holm's correction.
        verdict: `better` or `worse` if the (corrected) p-value is below 0.05, else `equivalent` if
            `equivalence_p` is below 0.05, else `inconclusive`.
        power: probability of finding a true difference as large as the margin.
        detectable: smallest true difference that would be found with probability 0.8.
        seed_correlation: correlation of both arms' scores over seeds; None with fewer than three seeds, or if the
            scores of an arm are all equal.
    """

    arm: str
    reference: str
    score: Score
    is_primary: bool
    num_seeds: int
    difference: Estimate
    p_value: float
    holm_p: float | None
    margin: float
    equivalence_p: float
    verdict: Outcome
    power: float
    detectable: float
    seed_correlation: float | None


def judge(
    margins: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    prompts: Sequence[str],
    *,
    reference: str = "adamw",
    primary: Score = "nll",
    label: Float[np.ndarray, " pairs"] | None = None,
    weight: Float[np.ndarray, " pairs"] | None = None,
) -> tuple[Verdict, ...]:
    """Verdicts on every arm except the reference, in every score.

    Differences are paired by seed and prompt; `PairedScores` describes their error. p-values are from Student's t test,
    and for the primary score they are adjusted over challengers (Holm, 1979). Power is for the strictest Holm level.

    Args:
        margins: margins of each arm times beta, with the seeds in the same order.
        prompts: prompt of each pair.
        reference: name of the arm that the others are compared with.
        primary: score that decides.
        label: probability that the chosen response is the better one, in [0, 1]; None means 1.
        weight: number of pairs that each pair counts as, positive; None means 1.

    Raises:
        ConfigError: if the reference is missing, there is no other arm, arms differ in their seeds or pairs, or there
            are fewer than two seeds.
    """
    require_known("reference", reference, tuple(margins))
    if len(margins) < 2:
        raise ConfigError(f"a verdict needs another arm than the reference {reference}; add one")
    for arm, values in margins.items():
        if values.shape != margins[reference].shape or values.shape[1] != len(prompts):
            raise ConfigError(
                f"arms must have margins of the same seeds and of {len(prompts)} pairs, got {values.shape} of {arm} "
                f"and {margins[reference].shape} of {reference}"
            )
    if (num_seeds := len(margins[reference])) < 2:
        raise ConfigError(f"a verdict needs at least two common seeds, got {num_seeds}; train more seeds")
    challengers = [arm for arm in margins if arm != reference]
    paired = [PairedScores(margins[arm], margins[reference], prompts, label, weight) for arm in challengers]
    alone = [PairedScores(margins[arm], None, prompts, label, weight) for arm in (*challengers, reference)]
    found: list[Verdict] = []
    for score in SCORES:
        effects = [each.crossed(score) for each in paired]  # positive if the challenger is better
        differences = effects if score == "accuracy" else [effect.negated for effect in effects]
        tests = FamilyOfTests.of(differences, MARGINS[score], corrected=score == primary)
        found += [
            Verdict(
                arm=arm,
                reference=reference,
                score=score,
                is_primary=score == primary,
                num_seeds=num_seeds,
                difference=differences[i].estimate,
                p_value=differences[i].p_different,
                holm_p=float(tests.different[i]) if score == primary else None,
                margin=MARGINS[score],
                equivalence_p=float(tests.equivalent[i]),
                verdict=tests.outcome(i, score),
                power=tests.power(i),
                detectable=tests.detectable(i),
                seed_correlation=_correlation(alone[i].per_seed(score), alone[-1].per_seed(score)),
            )
            for i, arm in enumerate(challengers)
        ]
    return tuple(sorted(found, key=lambda each: not each.is_primary))


@dataclass(frozen=True)
class FamilyOfTests:
    """Tests of one score over all challengers.

    Args:
        differences: the challengers' scores minus the reference's.
        margin: difference that does not matter.
        different: p-values against no difference, after any correction.
        equivalent: p-values against a difference of at least the margin, after any correction.
        strictest: smallest level at which an uncorrected p-value is tested.
    """

    differences: Sequence[StudentMean]
    margin: float
    different: Float[np.ndarray, " arms"]
    equivalent: Float[np.ndarray, " arms"]
    strictest: float

    @classmethod
    def of(cls, differences: Sequence[StudentMean], margin: float, *, corrected: bool) -> FamilyOfTests:
        """Tests of these differences, with Holm's correction if `corrected`."""
        different = np.array([each.p_different for each in differences])
        equivalent = np.array([max(each.p_above(-margin), each.p_below(margin)) for each in differences])
        if not corrected:
            return cls(differences, margin, different, equivalent, ERROR_RATE)
        adjusted = holm_adjusted(different), holm_adjusted(equivalent)
        return cls(differences, margin, *adjusted, ERROR_RATE / len(differences))

    def outcome(self, i: int, score: Score) -> Outcome:
        """Outcome of a challenger."""
        if self.different[i] < ERROR_RATE:
            return "better" if (self.differences[i].value > 0) == (score == "accuracy") else "worse"
        return "equivalent" if self.equivalent[i] < ERROR_RATE else "inconclusive"

    def power(self, i: int) -> float:
        """Probability of finding a true difference as large as the margin."""
        each = self.differences[i]
        if not each.standard_error > 0:
            return 1.0 if each.standard_error == 0 else math.nan
        return power(self.margin, each.standard_error, each.freedom, error_rate=self.strictest)

    def detectable(self, i: int) -> float:
        """Smallest true difference found with probability 0.8."""
        each = self.differences[i]
        if not each.standard_error > 0:
            return each.standard_error
        return detectable_effect(each.standard_error, each.freedom, error_rate=self.strictest)


def _correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    if len(first) < 3 or first.std() == 0 or second.std() == 0:
        return None
    value = float(np.corrcoef(first, second)[0, 1])
    return value if math.isfinite(value) else None
