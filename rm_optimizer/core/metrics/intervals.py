"""Intervals: Wilson's of a probability, Student's of means, and the bootstrap over clusters.

Pairs of one prompt are not independent, so prompts are resampled. Every bootstrapped statistic is a function of totals
over clusters. So a whole bootstrap is one matrix product: `counts (resamples, clusters) @ sums (clusters, terms)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from rm_optimizer.core.metrics.estimate import CONFIDENCE, UNKNOWN, Estimate, IntervalKind
from rm_optimizer.errors import ConfigError

Statistic = Callable[[np.ndarray], np.ndarray]
"""Function from totals `(…, terms)` to statistics `(…, statistics)` along the last axis; NaN where undefined."""

BootstrapInterval = Literal["bca", "basic"]

FEWEST_RESAMPLED = 40
"""Clusters below which a bootstrap covers less than it states (about 0.89 at eight and 0.92 at twenty)."""
_RESAMPLED_CLUSTERS_AT_ONCE = 4_000_000
_MATCHED = 0.99
"""Quantile at which the degrees of freedom of a mean over seeds and prompts are found."""
_TAILS = np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])


def wilson_interval(frequency: float, num_samples: float, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of a probability seen as `frequency` in independent trials (Wilson, 1927).

    `(f + z^2 / 2n ± z sqrt(f (1 - f) / n + z^2 / 4n^2)) / (1 + z^2 / n)`; unlike the normal interval it stays inside
    [0, 1] and has width at frequencies of 0 and 1.

    Args:
        frequency: observed share of successes, in [0, 1].
        num_samples: trials, positive; an effective number may be fractional.
        confidence: nominal coverage of the interval.

    Example:
        >>> low, high = wilson_interval(0.5, 100)
        >>> round(low, 4), round(high, 4)
        (0.4038, 0.5962)
    """
    z = float(ndtri(0.5 + confidence / 2))
    center = frequency + z * z / (2 * num_samples)
    half = z * math.sqrt(frequency * (1 - frequency) / num_samples + z * z / (4 * num_samples**2))
    scale = 1 + z * z / num_samples
    low, high = (center - half) / scale, (center + half) / scale
    return min(max(low, 0.0), frequency), max(min(high, 1.0), frequency)


@dataclass(frozen=True)
class StudentMean:
    """Mean whose error is estimated, so that its distance from the truth in errors is Student's.

    Args:
        value: the mean.
        standard_error: estimated standard deviation of the mean; NaN where one sample gives none.
        freedom: degrees of freedom of the standard error.
        num_samples: independent samples behind it.
    """

    value: float
    standard_error: float
    freedom: float
    num_samples: int

    @property
    def estimate(self) -> Estimate:
        """The mean with its 95 % interval, or without one where the error is unknown."""
        if math.isnan(self.standard_error):
            return Estimate(self.value, None, self.num_samples)
        quantile = float(stdtrit(self.freedom, 0.5 + CONFIDENCE / 2))
        half = quantile * self.standard_error if self.standard_error else 0.0
        low, high = self.value - half, self.value + half
        return Estimate(self.value, self.standard_error, self.num_samples, low, high, IntervalKind.student)

    def p_above(self, null: float) -> float:
        """One-sided p-value against the claim that the true mean is at most `null`; NaN where the error is unknown.

        Example:
            >>> round(StudentMean(2.0, 0.5, 4, 5).p_above(1.0), 4)
            0.0581
        """
        if self.standard_error == 0:
            return 0.0 if self.value > null else 1.0
        return float(stdtr(self.freedom, (null - self.value) / self.standard_error))

    def p_below(self, null: float) -> float:
        """One-sided p-value against the claim that the true mean is at least `null`."""
        return self.negated.p_above(-null)

    @property
    def negated(self) -> StudentMean:
        """The mean with the other sign."""
        return replace(self, value=-self.value)

    @property
    def p_different(self) -> float:
        """Two-sided p-value against a true mean of 0."""
        return min(1.0, 2 * min(self.p_above(0.0), self.p_below(0.0)))


def student_mean(samples: Float[np.ndarray, " samples"], *, bias: float = 0.0, least_variance: float = 0.0) -> Estimate:
    """Mean of independent samples with Student's interval `mean ± t s / sqrt(n)`; one sample gets none.

    Args:
        samples: numbers, at least one.
        bias: size of an error that all samples share; adds to the standard error as an independent one does.
        least_variance: variance of a sample to assume at least, for few samples that are often equal.

    Example:
        >>> str(student_mean(np.array([1.0, 2.0, 3.0])))
        '2.000 [-0.484, 4.484]'
    """
    count, value = len(samples), float(samples.mean())
    if count < 2:
        return Estimate(value, None, count)
    error = math.hypot(math.sqrt(max(float(samples.var(ddof=1)), least_variance) / count), bias)
    return StudentMean(value, error, count - 1, count).estimate


def crossed_mean(
    per_seed: Float[np.ndarray, " seeds"], prompt_error: float, num_prompts: int, *, least_error: float = 0.0
) -> StudentMean:
    """Mean over seeds, with an error from the variances of the mean that seeds and prompts cause.

    Two or three seeds are too few to resample, and too few for Satterthwaite's degrees of freedom, which jump to those
    of the prompts whenever the seeds agree by chance. The half width is `sqrt(t_s^2 a + t_p^2 b)`, with `a` the
    variance that seeds cause, `b` that prompts cause, and `t` Student's quantiles of `seeds - 1` and `prompts - 1`
    degrees of freedom (Graybill & Wang, 1980, doi:10.1080/01621459.1980.10477565). It is never below `t_p` times the
    error of these models over prompts. The degrees of freedom are those that give this half width at 98 %, so that the
    tests of up to four arms by Holm's rule hold their level too. One seed has no variance and gets no error.

    Args:
        per_seed: value of each seed.
        prompt_error: standard error of the mean that prompts cause, whatever the seed; 0 where they cause none.
        num_prompts: prompts behind it.
        least_error: standard error of the mean over prompts for the given models.
    """
    from scipy.optimize import brentq  # takes a third of a second

    value, num_seeds = float(per_seed.mean()), len(per_seed)
    if num_seeds < 2:
        return StudentMean(value, math.nan, 0.0, num_prompts)
    a, b = float(per_seed.var(ddof=1)) / num_seeds, prompt_error**2
    error = math.sqrt(max(a + b, least_error**2))
    if num_prompts < 2 or not error:
        return StudentMean(value, error, float(num_seeds - 1), num_prompts)
    few, many = sorted((num_seeds - 1.0, num_prompts - 1.0))
    of_seeds, of_prompts = (float(stdtrit(count - 1, _MATCHED)) for count in (num_seeds, num_prompts))
    half = math.sqrt(max(of_seeds**2 * a + of_prompts**2 * b, (of_prompts * least_error) ** 2))

    def excess(freedom: float) -> float:
        return float(stdtrit(freedom, _MATCHED)) * error - half

    if excess(few) <= 0 or excess(many) >= 0:
        return StudentMean(value, error, few if excess(few) <= 0 else many, num_prompts)
    return StudentMean(value, error, float(brentq(excess, few, many)), num_prompts)


def with_student_interval(estimate: Estimate) -> Estimate:
    """The estimate with Student's interval from its standard error and samples; without an error it stays as it is."""
    if estimate.standard_error is None or estimate.num_samples < 2:
        return estimate
    freedom = estimate.num_samples - 1
    return StudentMean(estimate.value, estimate.standard_error, freedom, estimate.num_samples).estimate


def inside(estimate: Estimate, bounds: tuple[float, float] | None) -> Estimate:
    """The estimate with its interval cut to the values that the statistic can take; None leaves it as it is."""
    if bounds is None or estimate.low is None or estimate.high is None:
        return estimate
    return replace(estimate, low=max(estimate.low, bounds[0]), high=min(estimate.high, bounds[1]))


def with_honest_width(
    estimate: Estimate, cluster_weight: Float[np.ndarray, " clusters"], *, bounds: tuple[float, float] | None
) -> Estimate:
    """The estimate with its interval inside the bounds, and with another one if all clusters gave the same result.

    Resamples of equal results never differ, so neither bootstrap nor jackknife can estimate the error.
    A bounded statistic gets Wilson's interval, which is conservative for any variable within the bounds, over the
    effective number of clusters `(sum w)^2 / sum w^2` (Kish, 1965). An unbounded one gets no interval and no error.

    Args:
        estimate: result of `cluster_bootstrap`.
        cluster_weight: weight of each cluster in the statistic, not negative.
        bounds: smallest and largest value that the statistic can take; None for an unbounded one.

    Example:
        >>> str(with_honest_width(Estimate(0.5, 0.0, 4, 0.5, 0.5), np.ones(4), bounds=(0.0, 1.0)))
        '0.500 [0.150, 0.850]'
    """
    if estimate.standard_error is None or estimate.standard_error > 1e-12 * max(1.0, abs(estimate.value)):
        return inside(estimate, bounds)
    bare = replace(estimate, standard_error=None, low=None, high=None, kind=None)
    if bounds is None or np.count_nonzero(cluster_weight) < 2:
        return bare
    floor, span = bounds[0], bounds[1] - bounds[0]
    frequency = min(max((estimate.value - floor) / span, 0.0), 1.0)
    low, high = wilson_interval(frequency, float(cluster_weight.sum() ** 2 / (cluster_weight**2).sum()))
    error = span * (high - low) / (2 * float(ndtri(0.5 + CONFIDENCE / 2)))
    if estimate.low is None:
        return replace(bare, standard_error=error)
    low, high = floor + span * low, floor + span * high
    return replace(bare, standard_error=error, low=low, high=high, kind=IntervalKind.wilson)


def cluster_bootstrap(
    sums: Float[np.ndarray, "clusters terms"],
    statistic: Statistic,
    *,
    num_bootstrap: int,
    seed: int,
    kind: BootstrapInterval = "bca",
) -> tuple[Estimate, ...]:
    """Estimates of statistics of clustered data, with 95 % intervals from resampling whole clusters.

    "bca" is bias-corrected and accelerated (Efron, 1987, doi:10.1080/01621459.1987.10478410), its acceleration from
    the leave-one-cluster-out jackknife. "basic" is `[2 t - q_high, 2 t - q_low]` (Davison & Hinkley, 1997, Eq. 5.6),
    for statistics such as a calibration error, whose resamples are biased away from `t`; it is clipped at 0 and widened
    to contain the estimate. Fewer than `FEWEST_RESAMPLED` clusters have too few different resamples: their interval is
    Student's, with the jackknife's standard error and `clusters - 1` degrees of freedom. With `num_bootstrap=0` the
    standard error is the jackknife's and there is no interval. With fewer than two clusters there is neither.

    Args:
        sums: share of each cluster in each total.
        statistic: function from totals to statistics; called with a leading axis of resamples.
        num_bootstrap: resamples; 0 skips the bootstrap.
        seed: seed of the resampling; the same seed and number of clusters give the same resamples.
        kind: kind of the interval.

    Returns:
        One estimate for each statistic.
    """
    values = statistic(sums.sum(axis=0))
    num_clusters = sums.shape[0]
    if num_clusters < 2:
        return tuple(Estimate(float(value), None, num_clusters) for value in values)
    jackknife = statistic(sums.sum(axis=0) - sums).T
    if num_bootstrap == 0 or num_clusters < FEWEST_RESAMPLED:
        found = []
        for value, left_out in zip(values, jackknife, strict=True):
            error = float(np.sqrt((num_clusters - 1) * left_out.var())) if np.isfinite(left_out).all() else None
            found.append(Estimate(float(value), error, num_clusters))
        return tuple(map(with_student_interval, found) if num_bootstrap else found)
    replicates = statistic(_resampled_totals(sums, num_bootstrap, seed)).T
    return tuple(_resampled_estimate(*columns, kind) for columns in zip(values, jackknife, replicates, strict=True))


def ratios(totals: np.ndarray) -> np.ndarray:
    """Each total over the last one, NaN where that is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(totals[..., :-1] / totals[..., -1:])


def cluster_totals(
    rows: Float[np.ndarray, "rows terms"], clusters: Sequence[int] | Sequence[str] | None
) -> Float[np.ndarray, "clusters terms"]:
    """Sums of the rows of each cluster; None takes each row as one cluster.

    Raises:
        ConfigError: if the clusters are not one for each row.
    """
    if clusters is None:
        return rows
    if len(clusters) != len(rows):
        raise ConfigError(f"clusters must have one number for each of the {len(rows)} pairs, got {len(clusters)}")
    numbers, position = np.unique(np.asarray(clusters), return_inverse=True)
    totals = np.zeros((len(numbers), rows.shape[1]))
    np.add.at(totals, position, rows)
    return totals


def clustered_share(
    shares: Float[np.ndarray, " rows"],
    clusters: Sequence[int] | Sequence[str] | np.ndarray | None = None,
    *,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Mean of values in [0, 1] with Wilson's interval over the effective number of rows.

    That number is the rows over the design effect, at least 1: the variance of the mean that differences between
    clusters show, `m / (m - 1) sum_c (S_c - p n_c)^2 / n^2` over m clusters, over that of independent rows (Kish,
    1965). Equal rows count as one for each cluster.

    Args:
        shares: values in [0, 1], such as 1 for a success.
        clusters: cluster of each row, such as its prompt; None takes rows as independent.
        confidence: nominal coverage of the interval.

    Example:
        >>> str(clustered_share(np.array([1.0, 0.0, 1.0, 0.0])))
        '0.500 [0.150, 0.850]'
    """
    rows = np.stack([shares, np.ones_like(shares)], axis=1)
    sums = cluster_totals(rows, None if clusters is None else np.asarray(clusters).tolist())
    num_clusters, count = len(sums), float(len(shares))
    if not num_clusters:
        return UNKNOWN
    value = float(shares.mean())
    if num_clusters < 2:
        return Estimate(value, None, num_clusters)
    residual = sums[:, 0] - value * sums[:, 1]
    variance = num_clusters / (num_clusters - 1) * float((residual**2).sum()) / count**2
    independent = float(shares.var(ddof=1)) / count
    effective = count / max(variance / independent, 1.0) if independent else float(num_clusters)
    low, high = wilson_interval(value, effective, confidence=confidence)
    return Estimate(value, math.sqrt(variance), num_clusters, low, high, IntervalKind.wilson)


def _resampled_totals(sums: np.ndarray, num_bootstrap: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    num_clusters = sums.shape[0]
    rows_at_once = max(1, _RESAMPLED_CLUSTERS_AT_ONCE // num_clusters)
    parts = []
    for start in range(0, num_bootstrap, rows_at_once):
        rows = min(rows_at_once, num_bootstrap - start)
        drawn = rng.integers(num_clusters, size=(rows, num_clusters))
        drawn += np.arange(rows)[:, None] * num_clusters
        counts = np.bincount(drawn.ravel(), minlength=rows * num_clusters).reshape(rows, num_clusters)
        parts.append(counts.astype(np.float64) @ sums)
    return np.concatenate(parts)


def _resampled_estimate(
    value: float, left_out: np.ndarray, replicates: np.ndarray, kind: BootstrapInterval
) -> Estimate:
    """Estimate from resamples; those in which the statistic is undefined (no pair that it counts) are left out."""
    defined, num_clusters = replicates[np.isfinite(replicates)], len(left_out)
    if math.isnan(value) or defined.size < 2:
        return Estimate(float(value), None, num_clusters)
    if kind == "basic":
        high, low = 2 * value - np.quantile(defined, _TAILS)
        low, high = min(max(low, 0.0), value), max(high, value)
    else:
        low, high = np.quantile(defined, _bca_tails(value, left_out, defined))
    error = float(defined.std(ddof=1))
    return Estimate(float(value), error, num_clusters, float(low), float(high), IntervalKind.resampled)


def _bca_tails(value: float, left_out: np.ndarray, replicates: np.ndarray) -> np.ndarray:
    """Tail probabilities after correction for bias and skew; the plain ones where the correction is undefined."""
    tolerance = 1e-12 * max(1.0, abs(value))
    below = float((replicates < value - tolerance).mean())
    equal = float((np.abs(replicates - value) <= tolerance).mean())
    bias = float(ndtri(below + equal / 2))
    deviations = left_out.mean() - left_out
    spread = float((deviations**2).sum() ** 1.5)
    if not math.isfinite(bias) or not math.isfinite(spread) or spread == 0:
        return _TAILS
    acceleration = float((deviations**3).sum()) / (6 * spread)
    shifted = bias + ndtri(_TAILS)
    scale = 1 - acceleration * shifted
    return np.asarray(ndtr(bias + shifted / scale)) if (scale > 0).all() else _TAILS
