"""Verdicts on trained arms against a reference arm, over common seeds and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.stats import t as student_t

from rm_optimizer.core.metrics.effects import SCORES, Score, detectable_effect, holm_adjusted, paired_effect
from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.records.codec import JsonRecord

MARGINS: Mapping[Score, float] = MappingProxyType({"accuracy": 0.01, "nll": 0.005, "brier": 0.0025, "ece": 0.01})
"""Differences that do not matter."""


@dataclass(frozen=True, kw_only=True)
class Verdict(JsonRecord):
    """Outcome of an arm against the reference in one score.

    Args:
        arm: name of the challenger.
        reference: name of the arm that it is compared with.
        score: compared metric.
        is_primary: true of the one score whose tests are corrected for the number of challengers.
        difference: the challenger's score less the reference's, with its 95 % interval over seeds and prompts.
        p_value: two-sided, against no difference, with as many degrees of freedom as seeds less one.
        holm_p: the same after Holm's correction over challengers; None of an exploratory score.
        verdict: `better` or `worse` with the (corrected) p-value below 0.05, else `equivalent` with the interval inside
            the margin, else `inconclusive`.
        detectable: smallest true difference that would be found with probability 0.8, uncorrected.
    """

    arm: str
    reference: str
    score: Score
    is_primary: bool
    difference: Estimate
    p_value: float
    holm_p: float | None
    verdict: Literal["better", "worse", "equivalent", "inconclusive"]
    detectable: float


def judge(
    margins: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    prompts: Sequence[str],
    *,
    reference: str = "adamw",
    primary: Score = "nll",
    label: Float[np.ndarray, " pairs"] | None = None,
    weight: Float[np.ndarray, " pairs"] | None = None,
) -> tuple[Verdict, ...]:
    """Verdicts of every arm but the reference, in every score; two seeds at least.

    Args:
        margins: margins of each arm times beta, seeds in the same order.
        prompts: prompt of each pair.
        reference: name of the arm that the others are compared with.
        primary: score that decides.
        label: probability that the chosen response is the better one, in [0, 1]; None is 1.
        weight: number of pairs that each counts for, positive; None is 1.
    """
    arms, freedom = [arm for arm in margins if arm != reference], len(margins[reference]) - 1
    found: list[Verdict] = []
    for score in SCORES:
        gains = [
            paired_effect(margins[arm], margins[reference], prompts, score, label=label, weight=weight) for arm in arms
        ]
        alone = [_p_value(gain, freedom) for gain in gains]
        adjusted = holm_adjusted(np.array(alone)).tolist() if score == primary else alone
        for arm, gain, p_value, decisive in zip(arms, gains, alone, adjusted, strict=True):
            found.append(
                Verdict(
                    arm=arm,
                    reference=reference,
                    score=score,
                    is_primary=score == primary,
                    difference=gain if score == "accuracy" else _negated(gain),
                    p_value=p_value,
                    holm_p=decisive if score == primary else None,
                    verdict=_word(gain, decisive, MARGINS[score]),
                    detectable=detectable_effect(gain.standard_error, freedom) if gain.standard_error else 0.0,
                )
            )
    return tuple(found)


def _p_value(gain: Estimate, freedom: int) -> float:
    if not gain.standard_error:
        return 1.0 if gain.value == 0 else 0.0
    return float(2 * student_t.sf(abs(gain.value) / gain.standard_error, freedom))


def _word(gain: Estimate, p_value: float, margin: float) -> Literal["better", "worse", "equivalent", "inconclusive"]:
    if p_value < 1 - CONFIDENCE:
        return "better" if gain.value > 0 else "worse"
    is_inside = gain.low is not None and gain.high is not None and -margin < gain.low and gain.high < margin
    return "equivalent" if is_inside else "inconclusive"


def _negated(gain: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (gain.high, gain.low))
    return replace(gain, value=-gain.value, low=low, high=high)
