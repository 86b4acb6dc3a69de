"""Pictures of rewards that steer a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.reporting.style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    VERMILION,
    captioned_figure,
    draw_legend,
    new_figure,
    two_panels,
)
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
from rm_optimizer.rl_coupling.overoptimization import Optimization, OveroptimizationCurve, fitted_gain
from rm_optimizer.rl_coupling.rlhf.optimization import RLHFResult


def plot_best_of_n(curve: BestOfNCurve) -> Figure:
    """Expected proxy reward of the best of n responses, and below it the gold reward if it is known.

    Args:
        curve: the curve, with intervals over prompts.
    """
    caption = f"{curve.num_prompts:,} prompts, {curve.num_samples:,} responses each; bars: 95% intervals"
    gold = [point.gold for point in curve.points if point.gold is not None]
    sizes = [point.n for point in curve.points]
    if gold:
        figure, panels = two_panels("Best of n", caption, ratios=(1, 1))
        _draw(panels[1], sizes, gold, GREEN, "gold reward")
    else:
        figure, panels = new_figure("Best of n", caption)
    _draw(panels[0], sizes, [point.proxy for point in curve.points], BLUE, "reward that selects (proxy)")
    last = panels[-1]
    last.set_xscale("log", base=2)
    last.xaxis.set_major_locator(FixedLocator(sizes))
    last.xaxis.set_minor_locator(NullLocator())
    last.xaxis.set_major_formatter(ScalarFormatter())
    last.set_xlabel("responses to choose from, n")
    return figure


def plot_overoptimization(curve: OveroptimizationCurve) -> Figure:
    """Gains in proxy and gold reward by distance from the policy, with the fitted forms and the peak.

    Args:
        curve: the curve, with intervals over prompts.
    """
    form = "d (α − β d)" if curve.optimization == Optimization.best_of_n else "d (α − β log d)"
    verdict = "no fall shown" if curve.turning_point is None else f"gold falls by {curve.fall:.2f} from its highest"
    caption = f"n = {curve.num_prompts:,} prompts; lines: {form}; bars: 95% intervals; {verdict}"
    at_most = ", at most" if curve.optimization == Optimization.best_of_n else ""
    figure, (axes,) = captioned_figure("Over-optimization", caption)
    last = curve.points[-1].distance
    grid = np.linspace(0.0, last, 200)
    fit = curve.fit
    _draw_gain(axes, curve, [point.proxy for point in curve.points], BLUE, "proxy reward, which is optimized")
    axes.plot(grid, fitted_gain(grid, fit.proxy_alpha.value, fit.proxy_beta.value, curve.optimization), color=BLUE)
    _draw_gain(axes, curve, [point.gold for point in curve.points], GREEN, "gold reward")
    axes.plot(grid, fitted_gain(grid, fit.alpha.value, fit.beta.value, curve.optimization), color=GREEN)
    axes.axhline(0.0, color=GRAY, linewidth=1.0)
    if curve.peak_distance.value < last:
        label = f"peak of the fit, {curve.peak_distance:.2f}"
        axes.axvline(curve.peak_distance.value, color=VERMILION, linestyle=":", linewidth=1.4, label=label)
    axes.set(xlabel=f"distance from the policy, √KL (nats{at_most})", ylabel="gain (standard deviations)")
    draw_legend(axes, "upper left")
    return figure


def _draw_gain(axes: Axes, curve: OveroptimizationCurve, gains: Sequence[Estimate], color: str, label: str) -> None:
    _draw_bars(axes, [point.distance for point in curve.points], gains, color, label, "none")


def _draw(axes: Axes, sizes: Sequence[float], rewards: Sequence[Estimate], color: str, label: str) -> None:
    """Draw rewards with their intervals, and a legend."""
    _draw_bars(axes, sizes, rewards, color, label, "-")
    axes.set_ylabel("expected reward")
    draw_legend(axes, "lower right")


def _draw_bars(
    axes: Axes, places: Sequence[float], rewards: Sequence[Estimate], color: str, label: str, line: str
) -> None:
    """Draw points with their intervals."""
    values = np.array([reward.value for reward in rewards])
    low = [reward.value if reward.low is None else reward.low for reward in rewards]
    high = [reward.value if reward.high is None else reward.high for reward in rewards]
    axes.errorbar(
        places,
        values,
        yerr=[values - low, high - values],
        color=color,
        linestyle=line,
        marker="o",
        markersize=5,
        capsize=3,
        label=label,
    )


def plot_policy_run(result: RLHFResult) -> Figure:
    """Gains in proxy and gold reward over the steps of reinforcement learning, with divergence and disagreement below.

    Args:
        result: the run.
    """
    caption = (
        f"{result.config.algorithm.upper()}, {result.checkpoints[0].proxy.num_samples:,} prompts; gains over the start "
        "policy; bars: 95% intervals"
    )
    figure, panels = two_panels("Policy optimization", caption, ratios=(3, 2))
    steps = [each.step for each in result.checkpoints]
    _draw_bars(panels[0], steps, [each.proxy_gain for each in result.checkpoints], BLUE, "proxy reward", "-")
    gold = [each.gold_gain for each in result.checkpoints if each.gold_gain is not None]
    if gold:
        _draw_bars(panels[0], steps, gold, GREEN, "gold reward", "-")
    panels[0].axhline(0.0, color=GRAY, linewidth=1.0)
    panels[0].set_ylabel("gain")
    draw_legend(panels[0])
    root = [math.sqrt(each.divergence.value) for each in result.checkpoints]
    panels[1].plot(steps, root, color=INK, marker="o", markersize=4, label="√KL (nats)")
    panels[1].set(xlabel="optimizer steps", ylabel="√KL (nats)", ylim=(0.0, None))
    spread = [each.disagreement.value for each in result.checkpoints if each.disagreement is not None]
    if spread:
        _draw_disagreement(panels[1], steps, spread)
    return figure


def _draw_disagreement(axes: Axes, steps: Sequence[int], spread: Sequence[float]) -> None:
    """Draw the disagreement of an ensemble's members, on a separate axis on the right."""
    right = axes.twinx()
    right.plot(steps, spread, color=VERMILION, marker="s", markersize=4)
    right.set_ylabel("disagreement", color=VERMILION)
    right.set_ylim(0.0, None)
    right.spines[["top", "left"]].set_visible(False)
    right.tick_params(colors=GRAY, labelcolor=VERMILION, labelsize=9)
