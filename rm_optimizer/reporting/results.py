"""Figure of each kind of result, which `result.plot()` returns, and figures of rewards that steer a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.data_efficiency.blame import Blame
from rm_optimizer.evaluation.saved_model import Evaluation
from rm_optimizer.evaluation.suite_scores import SuiteResult
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings
from rm_optimizer.experiments.run_comparison import RunComparison
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.blame import plot_blame
from rm_optimizer.reporting.comparison import plot_differences
from rm_optimizer.reporting.figures import BLUE, GREEN, INK, VERMILION, draw_legend, new_figure
from rm_optimizer.reporting.landscape.results import drawings
from rm_optimizer.reporting.optimizer_comparison import plot_arm_differences
from rm_optimizer.reporting.readiness import plot_readiness
from rm_optimizer.reporting.run_report import plot_accuracy, plot_reliability
from rm_optimizer.reporting.suite import plot_suite
from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
from rm_optimizer.rl_coupling.overoptimization import Optimization, OveroptimizationCurve, fitted_gain
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport
from rm_optimizer.rl_coupling.rlhf import RLHFResult
from rm_optimizer.training.folder.record import RunResult


def plot_best_of_n(curve: BestOfNCurve) -> Figure:
    """Expected proxy reward of the best of n responses.

    Below it is the gold reward if it is known.

    Args:
        curve: the curve, with intervals over prompts.
    """
    caption = f"{curve.num_prompts:,} prompts, {curve.num_samples:,} responses each; bars: 95% intervals"
    sizes = [point.n for point in curve.points]
    rewards = {"reward that selects (proxy)": (BLUE, [point.proxy for point in curve.points])}
    if gold := [point.gold for point in curve.points if point.gold is not None]:
        rewards["gold reward"] = (GREEN, gold)
    figure, panels = new_figure("Best of n", caption, ratios=(1,) * len(rewards))
    for panel, (label, (color, found)) in zip(panels, rewards.items(), strict=True):
        panel.estimates(sizes, found, label, color=color, markersize=5, capsize=3)
        panel.set_ylabel("expected reward")
        draw_legend(panel, "lower right")
    last = panels[-1]
    last.set_xscale("log", base=2)
    last.xaxis.set_major_locator(FixedLocator(sizes))
    last.xaxis.set_minor_locator(NullLocator())
    last.xaxis.set_major_formatter(ScalarFormatter())
    last.set_xlabel("responses to choose from, n")
    return figure


def plot_overoptimization(curve: OveroptimizationCurve) -> Figure:
    """Gains in proxy and gold reward by distance from the policy.

    They have the fitted forms and the peak.

    Args:
        curve: the curve, with intervals over prompts.
    """
    form = "d (α − β d)" if curve.optimization == Optimization.best_of_n else "d (α − β log d)"
    verdict = "no fall shown" if curve.turning_point is None else f"gold falls by {curve.fall:.2f} from its highest"
    caption = f"n = {curve.num_prompts:,} prompts; lines: {form}; bars: 95% intervals; {verdict}"
    at_most = ", at most" if curve.optimization == Optimization.best_of_n else ""
    figure, (axes,) = new_figure("Over-optimization", caption)
    distances = [point.distance for point in curve.points]
    grid, fit = np.linspace(0.0, distances[-1], 200), curve.fit
    proxy, gold = ([getattr(point, name) for point in curve.points] for name in ("proxy", "gold"))
    for gains, color, label, alpha, beta in (
        (proxy, BLUE, "proxy reward, which is optimized", fit.proxy_alpha, fit.proxy_beta),
        (gold, GREEN, "gold reward", fit.alpha, fit.beta),
    ):
        axes.estimates(distances, gains, label, color=color, linestyle="none", markersize=5, capsize=3)
        axes.curve(grid, fitted_gain(grid, alpha.value, beta.value, curve.optimization), color=color)
    axes.guide(y=0.0)
    if (peak := curve.peak_distance.value) < distances[-1]:
        axes.guide(f"peak of the fit, {peak:.2f}", x=peak, color=VERMILION, linestyle=":", linewidth=1.4)
    axes.set(xlabel=f"distance from the policy, √KL (nats{at_most})", ylabel="gain (standard deviations)")
    draw_legend(axes, "upper left")
    return figure


def plot_policy_run(result: RLHFResult) -> Figure:
    """Gains in proxy and gold reward over reinforcement learning.

    Divergence and disagreement are below.

    Args:
        result: the run.
    """
    caption = (
        f"{result.config.algorithm.upper()}, {result.checkpoints[0].proxy.num_samples:,} prompts; gains over the start "
        "policy; bars: 95% intervals"
    )
    spread = [each.disagreement.value for each in result.checkpoints if each.disagreement is not None]
    figure, panels = new_figure("Policy optimization", caption, ratios=(3, 2, 2) if spread else (3, 2))
    steps = [each.step for each in result.checkpoints]
    proxy = [each.proxy_gain for each in result.checkpoints]
    gold = [each.gold_gain for each in result.checkpoints if each.gold_gain is not None]
    for gains, color, label in ((proxy, BLUE, "proxy reward"), (gold, GREEN, "gold reward")):
        if gains:
            panels[0].estimates(steps, gains, label, color=color, markersize=5, capsize=3)
    panels[0].guide(y=0.0)
    panels[0].set_ylabel("gain")
    draw_legend(panels[0])
    root = [math.sqrt(each.divergence.value) for each in result.checkpoints]
    panels[1].curve(steps, root, "√KL (nats)", color=INK, marker="o", markersize=4)
    panels[1].set(ylabel="√KL (nats)", ylim=(0.0, None))
    if spread:
        panels[2].curve(steps, spread, "disagreement of the ensemble", color=VERMILION, marker="s", markersize=4)
        panels[2].set(ylabel="disagreement", ylim=(0.0, None))
    panels[-1].set_xlabel("optimizer steps")
    return figure


def figure_of(result: object) -> Figure:
    """The figure that shows a result.

    Raises:
        TypeError: if no figure shows results of its kind.
    """
    for kind, draw in FIGURES.items():
        if isinstance(result, kind):
            return draw(result)
    known = ", ".join(sorted(kind.__name__ for kind in FIGURES))
    raise TypeError(f"no figure shows a result of type {type(result).__name__}; there are figures of {known}")


def _of_a_landscape(result: LandscapeRecord) -> Figure:
    figure = drawings(result)[0].figure
    assert figure is not None, "only later drawings are rows alone"
    return figure


FIGURES: Mapping[type, Callable[[Any], Figure]] = {
    RunResult: lambda run: plot_accuracy(RunFolder(Path(run.run_dir)).metrics(), ceiling=run.data.ceiling),
    Evaluation: lambda found: plot_reliability(found.metrics),
    PairwiseMetrics: plot_reliability,
    RunComparison: plot_differences,
    ComparisonFindings: plot_arm_differences,
    BestOfNCurve: plot_best_of_n,
    OveroptimizationCurve: plot_overoptimization,
    RLHFResult: plot_policy_run,
    RLReadinessReport: plot_readiness,
    LandscapeRecord: _of_a_landscape,
    SuiteResult: plot_suite,
    Blame: plot_blame,
}
"""Function that draws each kind of result."""
