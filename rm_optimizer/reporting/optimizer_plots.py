"""Pictures of a comparison of optimizers: learning-rate sensitivity, differences and learning curves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.calibration import ReliabilityBin
from rm_optimizer.experiments.optimizer_comparison.findings import ArmFinding, ComparisonFindings
from rm_optimizer.experiments.verdicts import Verdict
from rm_optimizer.reporting.plots import CHANCE_LOSS
from rm_optimizer.reporting.style import GRAY, INK, SERIES, captioned_figure, count_ticks, draw_legend, two_panels


def plot_rate_sensitivity(found: ComparisonFindings) -> Figure:
    """Validation NLL of the last weights against the learning rate, a line for each optimizer.

    Args:
        found: findings of the comparison.
    """
    options = found.frozen.options
    count = found.frozen.sizes["val"]
    caption = f"n = {count:,} validation pairs; {options.tuning_seeds} tuning seed(s) a rate; ring: chosen"
    figure, (axes,) = captioned_figure("Learning-rate sensitivity", caption)
    axes.axhline(CHANCE_LOSS, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2, label="chance")
    for index, arm in enumerate(found.arms):
        points = sorted((point for point in found.rates if point.arm == arm.name), key=lambda point: point.rate)
        rates = sorted({point.rate for point in points})
        means = [float(np.mean([point.nll for point in points if point.rate == rate])) for rate in rates]
        axes.plot(rates, means, label=arm.name, marker="o", markersize=4, **_line(index))
        axes.plot(
            [point.rate for point in points], [point.nll for point in points], ".", color=_color(index), alpha=0.4
        )
        if arm.chosen.rate is not None:
            ring = {"marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 1.8}
            axes.plot([arm.chosen.rate], [means[rates.index(arm.chosen.rate)]], color=_color(index), **ring)  # type: ignore[arg-type]
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation NLL (nats a pair)")
    draw_legend(axes)
    return figure


def plot_arm_differences(found: ComparisonFindings) -> Figure:
    """Differences from the reference in test NLL and accuracy, with 95 % intervals.

    Args:
        found: findings with verdicts.
    """
    frozen = found.frozen
    arms = [arm.name for arm in found.arms if arm.name != frozen.options.reference]
    caption = (
        f"each optimizer less {frozen.options.reference}, 95 % intervals over seeds and prompts; "
        f"{_num_seeds(found)} seeds; n = {frozen.sizes['test']:,} test pairs of {frozen.prompts['test']:,} prompts"
    )
    figure, panels = two_panels("Differences to the reference", caption, ratios=(1, 1), shares_x=False)
    figure.set_size_inches(7.0, 3.2 + 0.5 * len(arms))
    for axes, score, label in zip(
        panels, ("nll", "accuracy"), ("NLL, nats (left is better)", "accuracy (right is better)"), strict=True
    ):
        items = {item.arm: item for item in found.verdicts if item.score == score}
        for row, arm in enumerate(arms):
            _draw_difference(axes, row, items[arm])
        axes.axvline(0.0, color=GRAY, linewidth=1.2)
        axes.set_yticks(range(len(arms)), [f"{arm}: {items[arm].verdict}" for arm in arms])
        axes.set(ylim=(len(arms) - 0.5, -0.5), xlabel=f"difference in {label}")
        axes.margins(x=0.15)
    return figure


def _draw_difference(axes: Any, row: int, item: Verdict) -> None:
    """Draw an arm's difference from the reference with its interval, colored by the verdict."""
    color = {"better": SERIES[0], "worse": SERIES[1]}.get(item.verdict, INK)
    estimate = item.difference
    if estimate.low is not None and estimate.high is not None:
        axes.hlines(row, estimate.low, estimate.high, color=color, linewidth=2.0)
    axes.plot([estimate.value], [row], marker="o", markersize=6, color=color)


def plot_reliabilities(found: ComparisonFindings) -> Figure:
    """Frequency by confidence on the test pairs, for each seed and for all seeds of an optimizer together.

    Args:
        found: findings of the comparison.
    """
    count = found.frozen.sizes["test"]
    caption = (
        f"n = {count:,} test pairs a run; pale: each seed; strong: all seeds of an optimizer together, "
        f"bins of at least {_LEAST_IN_BIN} pairs"
    )
    figure, (axes,) = captioned_figure("Reliability", caption)
    axes.plot([0.5, 1.0], [0.5, 1.0], color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2, label="perfectly calibrated")
    for index, arm in enumerate(found.arms):
        for bins in arm.reliability:
            points = [(item.mean_confidence, item.frequency) for item in bins]
            axes.plot(*zip(*points, strict=True), color=_color(index), linewidth=0.8, alpha=0.3)
        confidence, frequency = _joined_bins(arm).T
        axes.plot(confidence, frequency, label=arm.name, marker="o", markersize=3.5, **_line(index))
    axes.set(
        xlim=(0.495, 1.005), xlabel="probability of the preferred side", ylabel="how often that side was the better one"
    )
    draw_legend(axes, "lower right")
    return figure


def _joined_bins(arm: ArmFinding) -> Float[np.ndarray, "bins 2"]:
    """Mean confidence and frequency over all seeds, in each bin with enough pairs."""
    bins: dict[float, list[ReliabilityBin]] = {}
    for item in sorted((item for seed in arm.reliability for item in seed), key=lambda item: item.low):
        bins.setdefault(item.low, []).append(item)
    points = [
        np.average([(item.mean_confidence, item.frequency) for item in items], axis=0, weights=pairs)
        for items in bins.values()
        if sum(pairs := [item.num_pairs for item in items]) >= _LEAST_IN_BIN
    ]
    return np.array(points).reshape(-1, 2)


_LEAST_IN_BIN = 10
"""Least number of pairs in a bin for its frequency to be drawn."""


def plot_sharpness(found: ComparisonFindings) -> Figure:
    """Test accuracy by the top eigenvalue of the Hessian, a point for each final run with measured curvature.

    Args:
        found: findings of the comparison.
    """
    caption = "a point for each final run; runs that differ in sharpness differ in much else: no cause is shown"
    figure, (axes,) = captioned_figure("Sharpness and accuracy", caption)
    for index, arm in enumerate(found.arms):
        points = [
            (sharpness, accuracy)
            for sharpness, accuracy in zip(arm.per_seed["top_eigenvalue"], arm.per_seed["accuracy"], strict=True)
            if math.isfinite(sharpness) and sharpness > 0
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=_color(index), markersize=5, label=arm.name)
    axes.set(xscale="log", xlabel="top eigenvalue of the Hessian", ylabel="test accuracy")
    draw_legend(axes)
    return figure


def plot_curves(found: ComparisonFindings) -> Figure:
    """Validation NLL of the final runs over steps and over seconds, with the target.

    Args:
        found: findings of the comparison.
    """
    caption = "pale: each seed; strong: mean over seeds; dashed: target"
    figure, panels = two_panels("Learning curves of the final runs", caption, ratios=(1, 1), shares_x=False)
    for axes, name, label in zip(panels, ("step", "seconds"), ("optimizer step", "seconds in steps"), strict=True):
        if math.isfinite(found.target):
            axes.axhline(found.target, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2)
        for index, arm in enumerate(found.arms):
            _draw_curves(axes, arm, name, index)
        axes.set(xlabel=label, ylabel="validation NLL")
    count_ticks(panels[0].xaxis)
    draw_legend(panels[0])
    return figure


def _draw_curves(axes: Any, arm: ArmFinding, name: str, index: int) -> None:
    courses = [[(getattr(point, name), point.nll) for point in curve.points] for curve in arm.curves if curve.points]
    for course in courses:
        axes.plot(*zip(*course, strict=True), color=_color(index), linewidth=0.8, alpha=0.3)
    if shortest := min(map(len, courses), default=0):
        mean = np.mean([course[:shortest] for course in courses], axis=0)
        axes.plot(mean[:, 0], mean[:, 1], label=arm.name, marker="o", markersize=3.5, **_line(index))


def _num_seeds(found: ComparisonFindings) -> str:
    counts = sorted({len(arm.seeds) for arm in found.arms})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _color(index: int) -> str:
    return SERIES[index % len(SERIES)]


def _line(index: int) -> dict[str, Any]:
    """Color and dash pattern of a series; repeated colors have another pattern."""
    return {"color": _color(index), "linestyle": ("-", "--", ":", "-.")[index // len(SERIES) % 4], "linewidth": 1.7}
