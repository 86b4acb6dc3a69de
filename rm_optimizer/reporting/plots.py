"""Pictures of a run and of an evaluation, drawn from stored results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.reporting.style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    LIGHT,
    ORANGE,
    VERMILION,
    count_ticks,
    draw_legend,
    new_figure,
)

History = Sequence[Mapping[str, str | float | None]]
"""Rows of `metrics.csv`: a `step` and columns whose cells may be empty."""

CHANCE_LOSS = math.log(2)


def plot_loss(history: History) -> Figure:
    """Training and validation loss over optimizer steps, with chance (log 2) marked.

    Args:
        history: rows with `step`, `train_loss` and `eval_loss`.
    """
    figure, (axes,) = new_figure("Loss", _history_caption(history, "train_loss"))
    axes.axhline(CHANCE_LOSS, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2, label="chance, log 2")
    _draw_training(axes, history, "train_loss")
    _draw_validation(axes, history, "eval_loss")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a pair)")
    _fit_losses(axes, history)
    _fit_steps(axes, history)
    draw_legend(axes)
    return figure


def plot_accuracy(history: History, *, ceiling: float | None = None) -> Figure:
    """Training and validation accuracy over optimizer steps, with chance and the world's ceiling marked.

    Args:
        history: rows with `step`, `train_acc` and `eval_acc`.
        ceiling: accuracy of the gold reward of a synthetic world; none is drawn where it is unknown.
    """
    figure, (axes,) = new_figure("Pairwise accuracy", _history_caption(history, "train_acc"))
    if ceiling is not None:
        axes.axhline(ceiling, color=GREEN, linestyle="--", linewidth=1.4, label=f"ceiling {ceiling:.3f} (gold reward)")
    axes.axhline(0.5, color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2, label="chance")
    _draw_training(axes, history, "train_acc")
    _draw_validation(axes, history, "eval_acc")
    axes.set(xlabel="optimizer step", ylabel="accuracy, ties one half", ylim=(_lowest_accuracy(history), 1.0))
    _fit_steps(axes, history)
    draw_legend(axes, "lower right")
    return figure


def plot_reliability(metrics: PairwiseMetrics) -> Figure:
    """Frequency by confidence with 95 % intervals, and the number of pairs in each bin."""
    bins = metrics.reliability
    caption = f"ECE {metrics.ece}, noise floor {metrics.ece_noise_floor:.3f}; n = {metrics.num_pairs:,} pairs"
    caption = metrics.collapse.reason or caption
    figure, (axes, strip) = new_figure("Reliability", caption, strip=True)
    confidence = np.array([item.mean_confidence for item in bins])
    frequency = np.array([item.frequency for item in bins])
    below = frequency - [item.frequency_low for item in bins]
    above = np.array([item.frequency_high for item in bins]) - frequency
    axes.plot([0.5, 1.0], [0.5, 1.0], color=GRAY, linestyle="--", linewidth=1.2, label="perfectly calibrated")
    axes.errorbar(
        confidence, frequency, yerr=[below, above], color=BLUE, marker="o", markersize=5, linewidth=1.6,
        elinewidth=1.2, capsize=3, label="model, 95% interval",
    )  # fmt: skip
    bottom = min(0.4, math.floor(10 * min(item.frequency_low for item in bins)) / 10)
    axes.set(xlim=(0.495, 1.005), ylim=(bottom, 1.02))
    axes.set(ylabel="how often that side was the better one")
    draw_legend(axes)
    _draw_counts(strip, metrics)
    return figure


def plot_margins(margins: Float[np.ndarray, " pairs"]) -> Figure:
    """Histogram of the margins, with wrongly ranked pairs in another color and ties marked.

    Args:
        margins: reward of the better response less that of the other.

    Raises:
        ValueError: if there are no margins.
    """
    if margins.size == 0:
        raise ValueError("margins must hold at least one pair, got none")
    wrong, tied = float((margins < 0).mean()), float((margins == 0).mean())
    caption = f"ranked wrongly {wrong:.1%}, tied {tied:.1%}, mean {margins.mean():.3g}; n = {margins.size:,} pairs"
    figure, (axes,) = new_figure("Reward margins", caption)
    edges, hidden = _margin_edges(margins)
    axes.axvline(0.0, color=GRAY, linewidth=1.0)
    for members, color, word in ((margins > 0, BLUE, "rightly"), (margins < 0, ORANGE, "wrongly")):
        if members.any():
            axes.hist(margins[members], edges.tolist(), color=color, label=f"ranked {word} ({members.mean():.1%})")
    if tied:
        num_tied = int((margins == 0).sum())
        axes.vlines(0.0, 0, num_tied, color=INK, linewidth=5, label=f"tied ({tied:.1%}, {num_tied:,} pairs)")
    median = float(np.median(margins))
    axes.axvline(median, color=INK, linewidth=1.2, linestyle=":", label=f"median {median:.3g}")
    beyond = f"; {hidden:,} pairs lie beyond" if hidden else ""
    axes.set(xlabel=f"margin: reward of the better response − reward of the other{beyond}", ylabel="pairs")
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)
    count_ticks(axes.yaxis)
    draw_legend(axes)
    return figure


def _margin_edges(margins: np.ndarray) -> tuple[np.ndarray, int]:
    """Edges of equal bins, one of them 0, over all but the outermost margins, and the number of margins outside."""
    low, high = np.quantile(margins, [0.002, 0.998])
    low, high = min(low, 0.0), max(high, 0.0)
    num_bins = min(40, 10 + math.isqrt(margins.size))
    width = (high - low) / num_bins if high > low else 0.05
    edges = width * np.arange(math.floor(low / width) - 1, math.ceil(high / width) + 2)
    return edges, int(((margins < edges[0]) | (margins > edges[-1])).sum())


def _column(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows with a finite number in the column."""
    cells = [(float(row["step"] or 0), float(row[name] or 0)) for row in history if row.get(name) not in (None, "")]
    points = np.array([cell for cell in cells if math.isfinite(cell[1])]).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _whole_batches(history: History) -> History:
    """The rows without steps of less than half a batch, which may end an epoch and whose noise looks like a jump."""
    sizes = [float(row.get("train_pairs") or 0) for row in history]
    least = max(sizes, default=0.0) / 2
    return [row for row, size in zip(history, sizes, strict=True) if not 0 < size < least]


def _smoothed(values: np.ndarray, half_width: int) -> np.ndarray:
    """Centered moving average; at the ends, over the part of the window that exists."""
    totals = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    return np.asarray((totals[end] - totals[start]) / (end - start))


def _half_width(num_rows: int) -> int:
    return num_rows // 50


def _draw_training(axes: Axes, history: History, name: str) -> None:
    steps, values = _column(_whole_batches(history), name)
    if not len(steps):
        return
    half_width = _half_width(len(steps))
    if half_width:
        axes.plot(steps, values, color=BLUE, alpha=0.22, linewidth=0.8)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, _smoothed(values, half_width), color=BLUE, linewidth=1.8, marker=marker, label="training")


def _draw_validation(axes: Axes, history: History, name: str) -> None:
    steps, values = _column(history, name)
    if len(steps):
        last = f"validation (last {values[-1]:.3f})"
        axes.plot(steps, values, color=VERMILION, linewidth=1.8, marker="o", markersize=4.5, label=last)


def _history_caption(history: History, name: str) -> str:
    steps, values = _column(history, name)
    half_width, last = _half_width(len(values)), int(steps[-1]) if len(steps) else 0
    pairs = _column(history, "eval_pairs")[1]
    validation = f"; validation on n = {int(pairs[-1]):,} pairs" if len(pairs) else ""
    window = f"; training: mean of {2 * half_width + 1} batches (pale: each)" if half_width else ""
    return f"{last:,} optimizer {'step' if last == 1 else 'steps'}{window}{validation}"


def _fit_steps(axes: Axes, history: History) -> None:
    last = max([1.0, *(float(row["step"] or 0) for row in history)])
    axes.set_xlim(-0.02 * last, 1.02 * last)
    count_ticks(axes.xaxis)


def _fit_losses(axes: Axes, history: History) -> None:
    """Axis limits around most of the curve and chance, so that neither a spike nor 0 flattens the rest."""
    training, validation = _column(history, "train_loss")[1], _column(history, "eval_loss")[1]
    ends = [CHANCE_LOSS, *(np.quantile(training, [0.02, 0.98]) if len(training) else []), *validation]
    low, high = float(min(ends)), float(max(ends))
    margin = 0.12 * max(high - low, 0.01 * high)
    axes.set_ylim(max(low - margin, 0.0), high + margin)


def _lowest_accuracy(history: History) -> float:
    training, validation = _column(history, "train_acc")[1], _column(history, "eval_acc")[1]
    lowest = min([0.5, *_smoothed(training, _half_width(len(training))), *validation])
    return float(max(0.0, math.floor(10 * lowest) / 10 - 0.1))


def _draw_counts(axes: Axes, metrics: PairwiseMetrics) -> None:
    for item in metrics.reliability:
        middle, width = (item.low + item.high) / 2, item.high - item.low
        axes.bar(middle, item.num_pairs, width=0.94 * width, color=LIGHT)
        axes.annotate(f"{item.num_pairs:,}", (middle, item.num_pairs), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.35)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="probability of the side the model prefers", ylabel="pairs")
