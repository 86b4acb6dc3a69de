"""Labels that a rule saves, from a comparison of learning curves at equal accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import isotonic_regression

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.data_efficiency.power_law import fit_power_laws
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord

PLACEBO_BOUND = 0.10
"""Largest absolute saving of a second random draw for a study to be accepted."""


@dataclass(frozen=True)
class LabelSaving(JsonRecord):
    """A rule compared with a random draw at one number of labels.

    Args:
        rule: name of the rule.
        saving: share of labels saved at the random draw's accuracy at `budget`; -1 if twice the budget is too few.
        accuracy_gain: accuracy at `budget` less the random draw's.
        nll_gain: NLL of the random draw at `budget` less the rule's, in nats.
    """

    rule: str
    saving: Estimate
    accuracy_gain: Estimate
    nll_gain: Estimate


@dataclass(frozen=True)
class LabelSavings(JsonRecord, indent=1):
    """Rules compared with a random draw over the same splits.

    Args:
        pool: name of the pool.
        budget: number of labels at which rules are compared.
        num_splits: number of random splits into pool and test pairs.
        rules: the rules, best saving first, including the second random draw.
        is_accepted: True if the second random draw saves at most a tenth, with an interval that contains 0.
    """

    pool: str
    budget: int
    num_splits: int
    rules: tuple[LabelSaving, ...]
    is_accepted: bool


def label_savings(
    pool: str,
    budgets: Sequence[int],
    accuracy: Mapping[str, Float[np.ndarray, "splits budgets"]],
    nll: Mapping[str, Float[np.ndarray, "splits budgets"]],
    *,
    budget: int,
    reference: str,
    placebo: str,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> LabelSavings:
    """Compare rules with a reference over splits.

    The saving at budget B is ``1 - n / B``, with `n` the number of labels at which the rule's curve has the accuracy of
    the reference's curve at B. Each curve is a power law ``c - a n^-b`` fitted to the mean over splits, or a monotone
    fit if no such law rises. If `n` is beyond the largest budget, it counts as twice B, a saving of -1. Intervals are
    percentiles of a bootstrap over splits, with the same resamples for all rules.

    Args:
        pool: name of the pool.
        budgets: numbers of labels, ascending, the largest twice `budget`.
        accuracy: accuracy of each rule, on the same splits.
        nll: NLL of each rule, on the same splits.
        budget: number of labels at which the rules are compared, one of `budgets`.
        reference: name of the random draw.
        placebo: name of a second random draw.
        num_bootstrap: resamples.
        seed: seed of the resamples.

    Raises:
        DataError: if there are fewer than two splits.
    """
    num_splits = len(accuracy[reference])
    if num_splits < 2:
        raise DataError(f"savings need at least 2 splits, got {num_splits}")
    labels = np.asarray(budgets, dtype=float)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(num_splits, np.full(num_splits, 1 / num_splits), size=num_bootstrap) / num_splits
    shares = np.concatenate([np.full((1, num_splits), 1 / num_splits), counts])  # the data first, then the resamples
    target = _at(labels, fitted(labels, shares @ accuracy[reference]), budget)
    place = list(budgets).index(budget)
    rules = [
        LabelSaving(
            rule,
            _saving(labels_needed(labels, fitted(labels, shares @ accuracy[rule]), target), budget, num_splits),
            student_mean(accuracy[rule][:, place] - accuracy[reference][:, place]),
            student_mean(nll[reference][:, place] - nll[rule][:, place]),
        )
        for rule in accuracy
        if rule != reference
    ]
    rules.sort(key=lambda found: -found.saving.value)
    second = next(found.saving for found in rules if found.rule == placebo)
    holds_zero = second.low is not None and second.high is not None and second.low <= 0 <= second.high
    return LabelSavings(pool, budget, num_splits, tuple(rules), abs(second.value) <= PLACEBO_BOUND and holds_zero)


def _saving(reached: Float[np.ndarray, " curves"], budget: int, num_splits: int) -> Estimate:
    """Saving, from the numbers of labels that the curve of the data (first) and of each resample needs."""
    savings = np.maximum(1 - reached / budget, -1.0).round(9)  # an equal curve saves 0, not rounding
    low, high = np.quantile(savings[1:], [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Estimate(float(savings[0]), float(savings[1:].std()), num_splits, float(low), float(high))


def fitted(
    labels: Float[np.ndarray, " budgets"], curves: Float[np.ndarray, "curves budgets"]
) -> Float[np.ndarray, "curves budgets"]:
    """Curves smoothed to rise with the labels: the best power law for each, or a monotone fit if no law rises.

    Args:
        labels: numbers of labels, ascending.
        curves: accuracies at these numbers.
    """
    best = fit_power_laws(labels, curves).at(labels)
    for place in np.flatnonzero(np.isnan(best[:, 0])):
        best[place] = isotonic_regression(curves[place]).x
    return best


def labels_needed(
    labels: Float[np.ndarray, " budgets"],
    curves: Float[np.ndarray, "curves budgets"],
    targets: Float[np.ndarray, " curves"],
) -> Float[np.ndarray, " curves"]:
    """Numbers of labels at which rising curves reach their targets, linear in log labels; infinite if they do not.

    A target below a curve's start is reached at its start.
    """
    needed = np.full(len(curves), np.inf)
    for place, (curve, target) in enumerate(zip(curves, targets, strict=True)):
        if curve[-1] >= target:
            above = int(np.argmax(curve >= target))
            if above == 0:
                needed[place] = labels[0]
                continue
            share = (target - curve[above - 1]) / (curve[above] - curve[above - 1])
            needed[place] = np.exp(np.log(labels[above - 1]) * (1 - share) + np.log(labels[above]) * share)
    return needed


def _at(
    labels: Float[np.ndarray, " budgets"], curves: Float[np.ndarray, "curves budgets"], budget: int
) -> Float[np.ndarray, " curves"]:
    """Values of the curves at a budget."""
    return np.array([np.interp(np.log(budget), np.log(labels), curve) for curve in curves])
