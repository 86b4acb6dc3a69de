"""Pictures of several runs: learning curves, differences from the baseline, and overlaid spectra."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rm_optimizer.experiments.run_comparison import ArmDifference, RunComparison
from rm_optimizer.landscape.estimates.density import SpectralDensity, density_curve
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.reporting.plots import CHANCE_LOSS, History
from rm_optimizer.reporting.style import GRAY, INK, SERIES, captioned_figure, count_ticks, draw_legend, two_panels

_MOST_NAMED = 12
"""Most arms in a legend; further arms are drawn without a name."""


def plot_learning_curves(histories: Mapping[str, Sequence[History]], *, same_pairs: bool) -> Figure:
    """Validation NLL and accuracy of each arm during training: a line for each run, and the mean over seeds on top.

    Args:
        histories: rows of the `metrics.csv` of each run, by arm.
        same_pairs: True if all runs were validated on the same pairs.
    """
    each_run = [history for runs in histories.values() for history in runs]
    sizes = {max((float(row.get("train_pairs") or 0) for row in history), default=0.0) for history in each_run}
    by_pairs = len(sizes) > 1
    several = any(len(runs) > 1 for runs in histories.values())
    parts = ["validation pairs" if same_pairs else "each run on its own validation pairs"]
    parts += ["pale: each seed; strong: mean over seeds"] if several else []
    figure, axes = two_panels("Learning curves", "; ".join(parts), ratios=(1, 1))
    for panel, column in zip(axes, ("eval_nll", "eval_acc"), strict=True):
        chance = CHANCE_LOSS if column == "eval_nll" else 0.5
        panel.axhline(chance, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2, label="chance")
        for index, (arm, runs) in enumerate(histories.items()):
            label = arm if index < _MOST_NAMED else None
            _draw_arm(panel, [_course(history, column, by_pairs) for history in runs], index, label)
    axes[0].set_ylabel("NLL (nats a pair)")
    axes[1].set(ylabel="accuracy", xlabel="training pairs" if by_pairs else "optimizer step")
    count_ticks(axes[1].xaxis)
    draw_legend(axes[0])
    return figure


def plot_differences(comparison: RunComparison) -> Figure:
    """Differences of each arm from the baseline in accuracy and NLL, with 95 % intervals.

    Args:
        comparison: comparison of at least two arms.
    """
    arms = [arm.name for arm in comparison.arms[1:]]
    caption = (
        f"each arm less {comparison.baseline}, 95 % intervals; n = {comparison.num_pairs:,} common validation pairs of "
        f"{comparison.num_prompts:,} prompts"
    )
    figure, axes = two_panels("Differences to the baseline", caption, ratios=(1, 1), shares_x=False)
    figure.set_size_inches(7.0, 3.2 + 0.5 * len(arms))
    for panel, score, good in ((axes[0], "accuracy", "right"), (axes[1], "nll", "left")):
        found = {item.arm: item for item in comparison.differences if item.score == score}
        for row, arm in enumerate(arms):
            _draw_difference(panel, row, found[arm])
        panel.axvline(0.0, color=GRAY, linewidth=1.2)
        panel.set_yticks(range(len(arms)), arms)
        panel.set(ylim=(len(arms) - 0.5, -0.5), xlabel=f"difference in {_LABELS[score]} ({good} is better)")
        panel.margins(x=0.15)
    return figure


def _draw_top(axes: Axes, spectrum: HessianSpectrum, index: int, label: str | None) -> None:
    """The largest eigenvalues by rank, with their error bounds."""
    values = np.array(spectrum.eigenvalues[: spectrum.num_top or None])
    rank = np.arange(1, len(values) + 1)
    errors = np.array(spectrum.error_bounds[: len(values)])
    axes.errorbar(rank, values, yerr=errors, label=label, marker="o", markersize=4, capsize=2, **_line(index))


def plot_spectra(spectra: Mapping[str, HessianSpectrum]) -> Figure:
    """Largest eigenvalues by rank, and densities if all spectra have one.

    Args:
        spectra: spectra by run, all of one matrix and one selection of parameters.
    """
    first = next(iter(spectra.values()))
    sizes = sorted({spectrum.num_pairs for spectrum in spectra.values()})
    shown = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}, so not quite comparable"
    title = f"{first.matrix.replace('_', '-').capitalize().replace('newton', 'Newton')}: spectra"
    caption = f"n = {shown} pairs, those of each analysis; {first.params} parameters; bars: error bounds"
    has_density = all(spectrum.density is not None for spectrum in spectra.values())
    figure, axes = (
        two_panels(title, caption, ratios=(1, 1), shares_x=False) if has_density else captioned_figure(title, caption)
    )
    for index, (name, spectrum) in enumerate(spectra.items()):
        _draw_top(axes[0], spectrum, index, name if index < _MOST_NAMED else None)
    axes[0].set(xlabel="rank from the largest", ylabel="eigenvalue")
    count_ticks(axes[0].xaxis)
    if has_density:
        _draw_densities(axes[1], [spectrum.density for spectrum in spectra.values() if spectrum.density is not None])
    draw_legend(axes[0])
    return figure


def _draw_densities(axes: Axes, densities: Sequence[SpectralDensity]) -> None:
    for index, density in enumerate(densities):
        curve = density_curve(density)
        axes.plot(curve.grid, curve.density, **_line(index))
    axes.set(xlabel="eigenvalue", ylabel="share per unit", yscale="log")
    axes.set_ylim(bottom=1e-6 * axes.get_ylim()[1])


_LABELS = {"accuracy": "accuracy", "nll": "NLL, nats"}


def _draw_difference(axes: Axes, row: int, item: ArmDifference) -> None:
    estimate = item.estimate
    color = INK if not item.verdict else SERIES[0] if item.verdict == "better" else SERIES[1]
    if estimate.low is not None and estimate.high is not None:
        axes.hlines(row, estimate.low, estimate.high, color=color, linewidth=2.0)
    axes.plot([estimate.value], [row], marker="o", markersize=6, color=color)


def _draw_arm(axes: Axes, courses: Sequence[tuple[np.ndarray, np.ndarray]], index: int, label: str | None) -> None:
    courses = [course for course in courses if len(course[0])]
    if len(courses) == 1:
        axes.plot(*courses[0], label=label, marker="o", markersize=3.5, **_line(index))
        return
    for steps, values in courses:
        axes.plot(steps, values, **_line(index) | {"linewidth": 0.9, "alpha": 0.3})
    common = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in courses))) if courses else []
    means = [float(np.mean([values[steps == step][0] for steps, values in courses])) for step in common]
    axes.plot(common, means, label=label, marker="o", markersize=3.5, **_line(index))


def _line(index: int) -> dict[str, Any]:
    """Color and dash pattern of a series; repeated colors have another pattern."""
    dashes = ("-", "--", ":", "-.")[index // len(SERIES) % 4]
    return {"color": SERIES[index % len(SERIES)], "linestyle": dashes, "linewidth": 1.7}


def _course(history: History, column: str, by_pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Steps, or numbers of training pairs up to them, and values of the rows with a finite number."""
    pairs, points = 0.0, []
    for row in history:
        pairs += float(row.get("train_pairs") or 0)
        value = float(row.get(column) or math.nan)
        if math.isfinite(value):
            points.append((pairs if by_pairs else float(row["step"] or 0), value))
    table = np.array(points).reshape(-1, 2)
    return table[:, 0], table[:, 1]
