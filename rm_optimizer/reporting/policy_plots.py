"""Pictures of rewards that steer a policy."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.reporting.style import BLUE, GREEN, draw_legend, new_figure, two_panels
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve


def plot_best_of_n(curve: BestOfNCurve) -> Figure:
    """Expected proxy reward of the best of n responses, and below it the gold reward where it is known.

    Args:
        curve: the curve, with intervals over prompts.
    """
    caption = f"n = {curve.num_prompts:,} prompts, {curve.num_samples:,} responses each; bars: 95% intervals"
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


def _draw(axes: Axes, sizes: Sequence[float], rewards: Sequence[Estimate], color: str, label: str) -> None:
    """Rewards with their intervals."""
    values = [reward.value for reward in rewards]
    below = [
        value - (value if reward.low is None else reward.low) for value, reward in zip(values, rewards, strict=True)
    ]
    above = [
        (value if reward.high is None else reward.high) - value for value, reward in zip(values, rewards, strict=True)
    ]
    axes.errorbar(sizes, values, yerr=[below, above], color=color, marker="o", markersize=5, capsize=3, label=label)
    axes.set_ylabel("expected reward")
    draw_legend(axes, "lower right")
