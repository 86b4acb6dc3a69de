"""Over-optimization: proxy and gold reward by distance from the policy, and the distance at which gold falls.

Gao, Schulman and Hilton (2022, https://arxiv.org/abs/2210.10760, section 3.1) fit the gain in gold reward over the
policy by `d (alpha - beta d)` for best-of-n and by `d (alpha - beta log d)` for reinforcement learning, with `d` the
square root of the divergence in nats. Both are linear in alpha and beta, so the fit is by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.integrate import trapezoid

from rm_optimizer.core.metrics.estimate import Estimate, finite_array
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, student_mean
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.rl_coupling.best_of_n_curve import kl_bound, powers_of_two, require_both, selected_means
from rm_optimizer.rl_coupling.out_of_distribution import halves
from rm_optimizer.schema.checks import require

_GRID = 200
"""Number of points in the integrals of gamma."""


class Optimization(StrEnum):
    """Method that moved the policy: selection of the best of n, or reinforcement learning."""

    best_of_n = "best_of_n"
    rl = "rl"


@dataclass(frozen=True)
class OveroptimizationPoint:
    """A policy at some distance from the first one.

    Args:
        distance: square root of the divergence from the first policy in nats.
        proxy: gain in proxy reward over the first policy, in standard deviations of the proxy reward under that policy.
        gold: gain in gold reward over the first policy, in standard deviations of the gold reward under that policy.
    """

    distance: float
    proxy: Estimate
    gold: Estimate


@dataclass(frozen=True)
class GaoFit:
    """Gold gain as `d (alpha - beta d)` or `d (alpha - beta log d)`.

    Args:
        alpha: initial gain for each unit of distance.
        beta: loss of gain with distance.
        residual: root mean square of the fit's residuals, in the unit of the gain.
        proxy_alpha: alpha of the proxy gain.
        proxy_beta: beta of the proxy gain.
    """

    alpha: Estimate
    beta: Estimate
    residual: float
    proxy_alpha: Estimate
    proxy_beta: Estimate


@dataclass(frozen=True)
class OveroptimizationCurve(JsonRecord, indent=2, rows="points"):
    """Gains in proxy and gold reward with distance from a policy.

    Both rewards are divided by their standard deviation within prompts under the first policy, so that their units are
    comparable. Intervals are over prompts.

    Args:
        optimization: method that moved the policy, which determines the form of the fit.
        points: points by ascending distance; the first is the policy itself at 0.
        fit: coefficients of the form.
        peak_distance: distance, at most the last point's, at which the fitted gold gain is largest.
        peak_gain: fitted gold gain at this distance.
        fall: measured gold gain at its highest point less the gain at the last point, over all checkpoints or sizes,
            the policy itself included. One half of the prompts chooses the point, and the other half measures the
            fall, so that the choice does not bias it. It is 0 without an interval if the last point is chosen.
        turning_point: distance of the chosen point if the interval of `fall` lies above 0; None if no
            over-optimization is shown.
        gamma: `integral |gold - proxy| / integral gold` of the fitted gains up to the last distance (Kim et al., 2025,
            https://arxiv.org/abs/2505.12763); NaN if the gold gain's integral is not positive.
        num_prompts: number of prompts.
    """

    optimization: Optimization
    points: tuple[OveroptimizationPoint, ...]
    fit: GaoFit
    peak_distance: Estimate
    peak_gain: Estimate
    fall: Estimate
    turning_point: float | None
    gamma: Estimate
    num_prompts: int

    def verdict(self, last: str) -> str:
        """Sentence that states if the gold reward falls.

        Args:
            last: description of the last point.
        """
        if self.turning_point is not None:
            place = f"√KL = {self.turning_point:.2f}" if self.turning_point else "the start"
            return (
                f"over-optimization: the gold reward is highest at {place} and then falls by {self.fall} standard "
                "deviations"
            )
        if self.fall.low is None:
            return f"no fall of the gold reward is shown: half of the prompts, which choose, rank {last} highest"
        return f"no fall of the gold reward is shown: its highest less its last is {self.fall} standard deviations"

    @classmethod
    def of_best_of_n(
        cls, proxy: ArrayLike, gold: ArrayLike, *, num_bootstrap: int = 1000, seed: int = 0
    ) -> OveroptimizationCurve:
        """The curve of best-of-n selection from a pool, at distances `sqrt(log n - (n - 1) / n)` of powers of 2.

        Args:
            proxy: rewards by which the best response is selected, shape (prompts, samples).
            gold: gold rewards of the same responses.
            num_bootstrap: resamples over prompts, at least 2.
            seed: seed of the resamples.

        Raises:
            DataError: if a reward is not finite, the shapes differ, or a reward is the same for all responses.
            ConfigError: if there are fewer than three powers of 2 above 1, the pool's size included.
        """
        proxy, gold = require_both(proxy, gold)
        sizes = powers_of_two(proxy.shape[1])
        means = selected_means(proxy, [proxy, gold], sizes)
        spreads = np.array([_within("proxy", proxy), _within("gold", gold)])[:, None, None]
        gains = (means[:, :, 1:] - means[:, :, :1]) / spreads
        distances = [math.sqrt(kl_bound(n)) for n in sizes[1:]]
        return _curve(Optimization.best_of_n, distances, gains, num_bootstrap, seed)

    @classmethod
    def of_checkpoints(
        cls,
        divergence: Sequence[float],
        proxy: ArrayLike,
        gold: ArrayLike,
        *,
        scales: tuple[float, float] = (1.0, 1.0),
        num_bootstrap: int = 1000,
        seed: int = 0,
    ) -> OveroptimizationCurve:
        """The curve of a run of reinforcement learning.

        Args:
            divergence: divergence of each checkpoint from the first, in nats, in the order of training, from 0. Points
                and fit leave out a checkpoint nearer to the first than an earlier one: sorted by distance it would
                precede the earlier one, so that growth between them would look like a fall.
            proxy: mean proxy reward of each checkpoint's responses to each prompt, shape (prompts, checkpoints).
            gold: mean gold reward of the same responses.
            scales: standard deviations of proxy and gold within prompts under the first checkpoint.
            num_bootstrap: resamples over prompts, at least 2.
            seed: seed of the resamples.

        Raises:
            DataError: if a number is not finite, a shape is wrong, or the first divergence is not 0.
            ConfigError: if there are too few checkpoints for the fit.
        """
        proxy, gold = require_both(proxy, gold)
        nats = finite_array(divergence, "divergences", ["checkpoint"])
        if nats.shape != proxy.shape[1:] or nats[0] != 0:
            raise DataError(
                f"expected a divergence for each of the {proxy.shape[1]} checkpoints, from 0 on, got {list(divergence)}"
            )
        require(min(scales) > 0, "scales", "be positive", scales)
        kinds = zip((proxy, gold), scales, strict=True)
        gains = np.stack([(kind[:, 1:] - kind[:, :1]) / scale for kind, scale in kinds])
        return _curve(Optimization.rl, np.sqrt(np.maximum(nats[1:], 0)).tolist(), gains, num_bootstrap, seed)


def _within(name: str, rewards: Float[np.ndarray, "prompts samples"]) -> float:
    """Standard deviation of a reward within prompts."""
    if rewards.shape[1] < 2:
        raise DataError(f"expected at least 2 responses to each prompt, got {rewards.shape[1]}")
    spread = math.sqrt(float(rewards.var(axis=1, ddof=1).mean()))
    if not spread > 1e-12 * max(1.0, float(np.abs(rewards).max())):
        raise DataError(
            f"the {name} reward is the same for all responses to every prompt, so there is no over-optimization curve"
        )
    return spread


def _curve(
    optimization: Optimization,
    measured: Sequence[float],
    all_gains: Float[np.ndarray, "kinds prompts measured"],
    num_bootstrap: int,
    seed: int,
) -> OveroptimizationCurve:
    """The curve: points and fit of those farther than all before them, fall and turning point of all measured."""
    farther = [place for place, each in enumerate(measured) if each > max([0.0, *measured[:place]])]
    distances, gains = [measured[place] for place in farther], all_gains[:, :, farther]
    if len(distances) < 3:
        raise ConfigError(f"a form of two coefficients needs at least 3 points beyond the policy, got {len(distances)}")
    _, num_prompts, num_points = gains.shape
    d = np.array(distances)
    basis = _basis(d, optimization)
    grid = np.linspace(0.0, d[-1], _GRID + 1)
    on_grid = _basis(grid, optimization)

    def statistics(totals: np.ndarray) -> np.ndarray:
        flat = totals[..., :-1] / totals[..., -1:]
        means = flat.reshape(*totals.shape[:-1], 2, num_points)
        coefficients = means @ np.linalg.pinv(basis).T
        (proxy_fit, gold_fit) = (coefficients[..., kind, :] for kind in (0, 1))
        fitted = coefficients @ on_grid.T
        peak = _peak(gold_fit, d[-1], optimization)
        height = (_basis(peak, optimization) * gold_fit).sum(axis=-1)
        over = trapezoid(fitted[..., 1, :], grid, axis=-1)
        apart = trapezoid(np.abs(fitted[..., 1, :] - fitted[..., 0, :]), grid, axis=-1)
        gamma = np.where(over > 0, apart / np.where(over > 0, over, 1.0), np.nan)
        derived = np.stack([peak, height, gamma], axis=-1)
        return np.concatenate([flat, gold_fit, proxy_fit, derived], axis=-1)

    rows = np.column_stack([gains.transpose(1, 0, 2).reshape(num_prompts, -1), np.ones(num_prompts)])
    found = cluster_bootstrap(rows, statistics, num_bootstrap=num_bootstrap, seed=seed)
    proxy, gold = found[:num_points], found[num_points : 2 * num_points]
    alpha, beta, proxy_alpha, proxy_beta, peak, height, gamma = found[2 * num_points :]
    left = gains[1].mean(axis=0) - basis @ np.array([alpha.value, beta.value])
    none = Estimate(0.0, 0.0, num_prompts, 0.0, 0.0)
    points = [OveroptimizationPoint(0.0, none, none), *map(OveroptimizationPoint, distances, proxy, gold)]
    highest, fall = _fall(np.pad(all_gains[1], ((0, 0), (1, 0))), seed)
    has_fallen = fall.low is not None and fall.low > 0
    return OveroptimizationCurve(
        optimization,
        tuple(points),
        GaoFit(alpha, beta, math.sqrt(float((left**2).mean())), proxy_alpha, proxy_beta),
        peak,
        height,
        fall,
        [0.0, *measured][highest] if has_fallen else None,
        gamma,
        num_prompts,
    )


def fitted_gain(
    distances: Float[np.ndarray, " points"], alpha: float, beta: float, optimization: Optimization
) -> Float[np.ndarray, " points"]:
    """Gain by the form at these distances."""
    return np.asarray(_basis(np.asarray(distances, dtype=np.float64), optimization) @ np.array([alpha, beta]))


def _basis(d: np.ndarray, optimization: Optimization) -> Float[np.ndarray, "*points 2"]:
    """Basis functions whose coefficients are alpha and beta."""
    safe = np.where(d > 0, d, 1.0)
    loss = d * d if optimization == Optimization.best_of_n else d * np.log(safe)
    return np.stack([d, -loss], axis=-1)


def _peak(coefficients: Float[np.ndarray, "*resamples 2"], last: float, optimization: Optimization) -> np.ndarray:
    """Distance in [0, last] at which the form is largest.

    If beta is above 0, the form is concave with its peak at `alpha / (2 beta)` or `exp(alpha / beta - 1)`. Otherwise it
    is largest at one of the ends.
    """
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    ratio = alpha / np.where(beta > 0, beta, 1.0)
    inner = ratio / 2 if optimization == Optimization.best_of_n else np.exp(np.minimum(ratio - 1, 700.0))
    end = (_basis(np.array(last), optimization) * coefficients).sum(axis=-1)
    return np.where(beta > 0, np.clip(inner, 0.0, last), np.where(end > 0, last, 0.0))


def _fall(gold: Float[np.ndarray, "prompts points"], seed: int) -> tuple[int, Estimate]:
    """Highest point by one half of the prompts, and its gain less the last one's by the other half.

    The last point less itself is 0 for every prompt, which measures nothing, so there is no interval then.
    """
    if len(gold) < 2:
        return 0, Estimate(math.nan, None, len(gold))
    choosing, measuring = halves(len(gold), seed)
    highest = int(gold[choosing].mean(axis=0).argmax())
    if highest == gold.shape[1] - 1:
        return highest, Estimate(0.0, None, len(measuring))
    return highest, student_mean(gold[measuring, highest] - gold[measuring, -1])
