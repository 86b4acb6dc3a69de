"""Agreement of rewards with preferences, exact over any batching, order and number of processes.

Metrics are computed once from all rewards in float64, never averaged over batches. Pairs are sorted first, so that the
result depends on the pairs alone, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from rm_optimizer.core.metrics.calibration import (
    FoldedPairs,
    ReliabilityBin,
    TemperatureFit,
    calibration_noise_floor,
    equal_mass_bins,
    equal_width_bins,
    expected_calibration_error,
    fit_temperature,
    fold,
    pair_scores,
    reliability_curve,
)
from rm_optimizer.core.metrics.estimate import UNKNOWN, Estimate
from rm_optimizer.core.metrics.intervals import (
    FEWEST_RESAMPLED,
    cluster_bootstrap,
    ratios,
    with_honest_width,
    with_student_interval,
)
from rm_optimizer.core.metrics.separation import (
    CollapseVerdict,
    ThresholdRates,
    detect_collapse,
    roc_auc,
    threshold_rates,
)
from rm_optimizer.records.codec import JsonRecord, json_values


@dataclass(frozen=True)
class PairColumns:
    """Float64 columns of pairs, sorted by prompt and then by value.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses.
        label: probability that `chosen` is the better one, in [0, 1].
        weight: number of pairs that each counts for, positive.
        length_gap: length of the preferred response less the other's; 0 if lengths are unknown.
        cluster: index of the pair's prompt, rising from 0 without gaps.
        position: position of the caller's pair i in these columns.
    """

    chosen: Float[np.ndarray, " pairs"]
    rejected: Float[np.ndarray, " pairs"]
    label: Float[np.ndarray, " pairs"]
    weight: Float[np.ndarray, " pairs"]
    length_gap: Float[np.ndarray, " pairs"]
    cluster: Int[np.ndarray, " pairs"]
    position: Int[np.ndarray, " pairs"]

    @classmethod
    def sorted(
        cls, chosen: Float[np.ndarray, " pairs"], prompt_ids: Sequence[str], **others: np.ndarray | None
    ) -> PairColumns:
        """The pairs in their fixed order; missing labels and weights are 1, and missing lengths 0.

        Raises:
            ValueError: if there are no pairs, lengths differ, or a number is not finite or out of range.
        """
        shape, columns = chosen.shape, {"chosen": chosen}
        for name, given in others.items():
            columns[name] = np.full(chosen.shape, float(name != "length_gap")) if given is None else given
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"chosen must have shape (pairs,) with at least one pair, got {shape}")
        for name, column in columns.items():
            if column.shape != shape:
                raise ValueError(f"{name} must have the shape of chosen, {shape}, got {column.shape}")
            if not np.isfinite(column).all():
                raise ValueError(f"{name} must be finite, got {column[~np.isfinite(column)][0]}")
        if len(prompt_ids) != shape[0]:
            raise ValueError(f"prompt_ids must name a prompt for each of {shape[0]} pairs, got {len(prompt_ids)}")
        lowest, highest = columns["label"].min(), columns["label"].max()
        if lowest < 0 or highest > 1:
            raise ValueError(f"label must lie in [0, 1], got {lowest} to {highest}")
        if columns["weight"].min() <= 0:
            raise ValueError(f"weight must be positive, got {columns['weight'].min()}")
        columns = {name: column.astype(np.float64) for name, column in columns.items()}
        cluster = np.unique(np.array(prompt_ids, dtype=str), return_inverse=True)[1]
        order = np.lexsort((*reversed(columns.values()), cluster))
        kept = {name: column[order] for name, column in columns.items()}
        return cls(**kept, cluster=cluster[order], position=np.argsort(order))

    def select(self, callers: Int[np.ndarray, " selected"]) -> PairColumns:
        """The pairs with the given indices in the caller's order."""
        index = np.sort(self.position[callers])
        kept = {name: column[index] for name, column in vars(self).items()}
        kept["cluster"] = np.unique(kept["cluster"], return_inverse=True)[1]
        kept["position"] = np.argsort(np.argsort(self.position[callers]))
        return PairColumns(**kept)


LEAST_PAIRS = 20
"""Least number of pairs for a group to be listed and not only counted; sources are always listed."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the margin that are reported."""

ESTIMATES = ("accuracy", "nll", "brier", "ece", "mean_margin")
"""Metrics that every evaluation gives with an interval."""
_NUMBERS = (
    *("tie_rate", "negative_margin_rate", "margin_std", "reward_mean", "reward_std"),
    *("ece_mass", "ece_noise_floor"),
)
_BOUNDS = {"accuracy": (0.0, 1.0), "brier": (0.0, 1.0), "longer_wins": (0.0, 1.0), "over_length": (-1.0, 1.0)}


@dataclass(frozen=True)
class PairwiseMetrics(JsonRecord):
    """Agreement of rewards with preferences; shares and means are weighted by the pairs' weights.

    The *margin* of a pair is the reward of the better response less the other's, by label; pairs labeled 0.5
    have no better response and count only in NLL, Brier score and calibration. With P = sigmoid(beta * margin),
    `accuracy = 1 - negative_margin_rate - tie_rate / 2`.

    Args:
        num_pairs: pairs evaluated.
        num_undecided: number of these pairs that are labeled exactly 0.5.
        num_prompts: different prompts.
        beta: inverse temperature of the probabilities.
        accuracy: share of pairs whose better response has the higher reward, ties one half.
        nll: mean negative log-likelihood in nats; chance is log 2.
        brier: mean squared error of P against the label's outcomes; chance is 0.25.
        ece: symmetrized expected calibration error, equal-width bins.
        mean_margin: mean margin, in units of reward.
        tie_rate: share of pairs with equal rewards.
        negative_margin_rate: share of pairs ranked against the label.
        margin_std: standard deviation of the margin (divisor: the total weight).
        margin_quantiles: margin at each of `QUANTILES`, in order.
        reward_mean: mean reward over all responses.
        reward_std: standard deviation of the reward over all responses.
        ece_mass: calibration error with bins of equal weight.
        ece_noise_floor: mean of `ece` for a perfectly calibrated model.
        temperature: the temperature that would calibrate the rewards.
        reliability: frequency against confidence, bin by bin.
        collapse: test that the rewards distinguish responses; if they do not, no other number is meaningful.
        groups: metrics of each value of each grouping column, `groups["source"]["hh"]`.
        longer_wins: accuracy of calling the longer response better, equal lengths one half; NaN where lengths are
            unknown.
        over_length: `accuracy` less `longer_wins`, its interval from the same resamples.
        num_effective_prompts: `(sum w)^2 / sum w^2` over the prompts' total weights w (Kish, 1965): number of equally
            weighted prompts with the same error.
        num_prompts_of_half: fewest prompts that together carry half of the weight.
        roc_auc: area under the ROC curve of better against worse responses of all prompts; NaN in older files.
        threshold_rates: rates of true and false positives at each threshold asked for.
    """

    num_pairs: int
    num_undecided: int
    num_prompts: int
    beta: float
    accuracy: Estimate
    nll: Estimate
    brier: Estimate
    ece: Estimate
    mean_margin: Estimate
    tie_rate: float
    negative_margin_rate: float
    margin_std: float
    margin_quantiles: tuple[float, ...]
    reward_mean: float
    reward_std: float
    ece_mass: float
    ece_noise_floor: float
    temperature: TemperatureFit
    reliability: tuple[ReliabilityBin, ...]
    collapse: CollapseVerdict
    groups: Mapping[str, Mapping[str, PairwiseMetrics]] = field(default_factory=dict)
    longer_wins: Estimate = UNKNOWN
    over_length: Estimate = UNKNOWN
    num_effective_prompts: float = math.nan
    num_prompts_of_half: int = 0
    roc_auc: Estimate = UNKNOWN
    threshold_rates: tuple[ThresholdRates, ...] = ()

    @property
    def macro_accuracy(self) -> Estimate | None:
        """Unweighted mean of the sources' accuracies; None with fewer than two sources.

        The standard error treats the sources as independent; it is None if a source has no error.
        """
        accuracies = [group.accuracy for group in self.groups.get("source", {}).values()]
        accuracies = [accuracy for accuracy in accuracies if not math.isnan(accuracy.value)]
        if len(accuracies) < 2:
            return None
        value = sum(accuracy.value for accuracy in accuracies) / len(accuracies)
        errors = [accuracy.standard_error for accuracy in accuracies if accuracy.standard_error is not None]
        total = math.sqrt(sum(error**2 for error in errors)) / len(accuracies)
        return Estimate(value, total if len(errors) == len(accuracies) else None, len(accuracies))

    @property
    def headline(self) -> str:
        """One line with the accuracy and its interval, or the reason why it means nothing."""
        return self.collapse.reason or f"accuracy {self.accuracy} ({self.num_pairs} pairs, {self.num_prompts} prompts)"

    def flat(self) -> dict[str, float]:
        """The numbers for a logger; a fitted temperature only if there is one, groups as `source/hh/accuracy`."""
        numbers = {name: getattr(self, name).value for name in ESTIMATES}
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        numbers |= {"collapsed": float(self.collapse.collapsed), "num_pairs": float(self.num_pairs)}
        if self.temperature.temperature is not None:
            numbers["temperature"] = self.temperature.temperature
        for column, members in self.groups.items():
            for name, metrics in members.items():
                numbers |= {f"{column}/{name}/{metric}": value for metric, value in metrics.flat().items()}
        return numbers

    def entries(self) -> dict[str, Any]:
        """The fields, and the macro accuracy."""
        return super().entries() | {"macro_accuracy": json_values(self.macro_accuracy)}


def evaluate_pairs(
    chosen: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    *,
    beta: float,
    prompt_ids: Sequence[str],
    label: Float[np.ndarray, " pairs"] | None = None,
    weight: Float[np.ndarray, " pairs"] | None = None,
    length_gap: Float[np.ndarray, " pairs"] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    thresholds: Iterable[float] = (),
    num_bootstrap: int,
    seed: int,
) -> PairwiseMetrics:
    """Compute every pairwise metric of the rewards; the main ones have a 95 % bootstrap interval over prompts.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses.
        beta: inverse temperature: P(chosen > rejected) = sigmoid(beta (chosen - rejected)).
        prompt_ids: prompt of each pair; pairs of one prompt are resampled together.
        label: probability that `chosen` is the better one, in [0, 1], so below 0.5 `rejected` is; none is 1.
        weight: number of pairs that each counts for, positive; none is 1.
        length_gap: length of the preferred response less the other's, for the length baseline.
        groups: columns to report separately, each with a value for every pair (`{"source": […]}`).
        thresholds: rewards at which to report the rates of true and false positives, over all pairs.
        num_bootstrap: resamples; 0 gives standard errors only, for quick evaluations.
        seed: seed of the bootstrap and the noise floor.

    Raises:
        ValueError: if there are no pairs, lengths differ, rewards are not finite, or a number is out of range.

    Example:
        >>> chosen, rejected = np.array([1.0, 0.0, 2.0, 0.5]), np.array([0.0, 1.0, 2.0, 0.0])
        >>> evaluate_pairs(chosen, rejected, beta=1.0, prompt_ids=list("abcd"), num_bootstrap=0, seed=0).accuracy.value
        0.625
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    pairs = PairColumns.sorted(chosen, prompt_ids, rejected=rejected, label=label, weight=weight, length_gap=length_gap)
    knows_length = length_gap is not None
    measure = partial(_metrics, beta=beta, num_bootstrap=num_bootstrap, seed=seed, knows_length=knows_length)
    by_group: dict[str, dict[str, PairwiseMetrics]] = {}
    for column, values in (groups or {}).items():
        if len(values) != len(chosen):
            raise ValueError(f"groups[{column!r}] must have a value for each of {len(chosen)} pairs, got {len(values)}")
        names = np.array([str(value) for value in values], dtype=object)
        by_group[column] = {name: measure(pairs.select(np.flatnonzero(names == name))) for name in sorted(set(names))}
    return replace(measure(pairs), groups=by_group, threshold_rates=threshold_rates(*_sides(pairs), thresholds))


def _metrics(pairs: PairColumns, *, beta: float, num_bootstrap: int, seed: int, knows_length: bool) -> PairwiseMetrics:
    logit = beta * (pairs.chosen - pairs.rejected)
    folded = fold(logit, pairs.label, pairs.weight)
    width_bins = equal_width_bins(folded.confidence)
    means = _mean_estimates(pairs, logit, num_bootstrap, seed)
    if not knows_length:
        means |= dict.fromkeys(("longer_wins", "over_length"), UNKNOWN)
    prompt_weight = _cluster_sums(pairs.weight[:, None], pairs.cluster)[:, 0]
    largest_first = np.cumsum(np.sort(prompt_weight)[::-1])
    half = largest_first[-1] / 2 * (1 - 1e-12)
    decided = pairs.label != 0.5
    rewards, twice = np.concatenate([pairs.chosen, pairs.rejected]), np.tile(pairs.weight, 2)
    return PairwiseMetrics(
        num_pairs=len(logit),
        num_undecided=int((~decided).sum()),
        num_prompts=int(pairs.cluster.max()) + 1,
        beta=beta,
        **means,
        ece=_ece_estimate(folded, width_bins, pairs.cluster, num_bootstrap, seed),
        **_margin_numbers(_margin(pairs)[decided], pairs.weight[decided]),
        reward_mean=float(np.average(rewards, weights=twice)),
        reward_std=_std(rewards, twice),
        ece_mass=expected_calibration_error(folded, equal_mass_bins(folded.confidence, pairs.weight)),
        ece_noise_floor=calibration_noise_floor(folded, width_bins, seed=seed),
        temperature=fit_temperature(logit, pairs.label, pairs.weight),
        reliability=reliability_curve(folded),
        collapse=detect_collapse(pairs.chosen, pairs.rejected, pairs.weight, means["nll"].value),
        num_effective_prompts=float(prompt_weight.sum() ** 2 / (prompt_weight**2).sum()),
        num_prompts_of_half=int(np.searchsorted(largest_first, half)) + 1,
        roc_auc=roc_auc(*_sides(pairs), pairs.cluster[decided], with_interval=num_bootstrap > 0),
    )


def _sides(pairs: PairColumns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards of the better and of the other response, and the weight, of each pair that has a better one."""
    decided, swapped = pairs.label != 0.5, pairs.label < 0.5
    better, worse = np.where(swapped, (pairs.rejected, pairs.chosen), (pairs.chosen, pairs.rejected))
    return better[decided], worse[decided], pairs.weight[decided]


def _margin(pairs: PairColumns) -> np.ndarray:
    """Reward of the better response less the other's; 0 for a pair labeled 0.5."""
    return np.asarray(np.sign(pairs.label - 0.5) * (pairs.chosen - pairs.rejected))


def _mean_estimates(pairs: PairColumns, logit: np.ndarray, num_bootstrap: int, seed: int) -> dict[str, Any]:
    """Accuracy, margin and length baseline over decided pairs, NLL and Brier score over all: ratios of sums.

    A prompt without a decided pair is no sample of the first ones.
    """
    margin, scores = _margin(pairs), pair_scores(logit, pairs.label)
    decided = (pairs.label != 0.5).astype(np.float64)
    longer = np.sign(pairs.label - 0.5) * np.sign(pairs.length_gap)
    of_decided = {
        "accuracy": scores["accuracy"],
        "mean_margin": decided * margin,
        "longer_wins": decided * (0.5 + 0.5 * longer),
        "over_length": decided * 0.5 * (np.sign(margin) - longer),
    }
    of_all = {"nll": scores["nll"], "brier": scores["brier"]}
    estimates: dict[str, Any] = {}
    for terms, count in ((of_decided, decided), (of_all, np.ones_like(decided))):
        sums = _cluster_sums(pairs.weight[:, None] * np.stack([*terms.values(), count], axis=1), pairs.cluster)
        sums = sums[sums[:, -1] > 0]
        found = cluster_bootstrap(sums, ratios, num_bootstrap=num_bootstrap, seed=seed)
        estimates |= {
            name: with_honest_width(estimate, sums[:, -1], bounds=_BOUNDS.get(name))
            for name, estimate in zip(terms, found, strict=True)
        }
    return estimates


def _ece_estimate(
    folded: FoldedPairs, bins: np.ndarray, cluster: np.ndarray, num_bootstrap: int, seed: int
) -> Estimate:
    """Calibration error with the wider one of the basic bootstrap's and Student's interval.

    Noise raises it, most of all with few prompts: the interval of fewer than `FEWEST_RESAMPLED` prompts begins at 0.
    """
    used = np.unique(bins, return_inverse=True)[1]
    terms = np.zeros((len(used), int(used.max()) + 2))
    terms[np.arange(len(used)), used] = folded.weight * (folded.confidence - folded.outcome)
    terms[:, -1] = folded.weight

    def error(totals: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(totals[..., :-1]).sum(axis=-1, keepdims=True) / totals[..., -1:])

    sums = _cluster_sums(terms, cluster)
    estimate = cluster_bootstrap(sums, error, num_bootstrap=num_bootstrap, seed=seed, kind="basic")[0]
    student = with_student_interval(estimate)
    if estimate.low is not None and estimate.high is not None and student.low is not None and student.high is not None:
        low = 0.0 if len(sums) < FEWEST_RESAMPLED else min(estimate.low, student.low)
        estimate = replace(estimate, low=low, high=max(estimate.high, student.high))
    return with_honest_width(estimate, sums[:, -1], bounds=(0.0, 1.0))


def _cluster_sums(terms: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(np.diff(cluster, prepend=-1))
    return np.add.reduceat(terms, starts, axis=0)


def _margin_numbers(margin: np.ndarray, weight: np.ndarray) -> dict[str, Any]:
    if margin.size == 0:
        names = ("tie_rate", "negative_margin_rate", "margin_std")
        return dict.fromkeys(names, math.nan) | {"margin_quantiles": (math.nan,) * len(QUANTILES)}
    return {
        "tie_rate": float(np.average(margin == 0, weights=weight)),
        "negative_margin_rate": float(np.average(margin < 0, weights=weight)),
        "margin_std": _std(margin, weight),
        "margin_quantiles": tuple(np.quantile(margin, QUANTILES, weights=weight, method="inverted_cdf").tolist()),
    }


def _std(values: np.ndarray, weight: np.ndarray) -> float:
    mean = np.average(values, weights=weight)
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weight)))
