"""Pictures and summary of a run, an evaluation or a diagnosis.

They come from stored results.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.doctor.diagnosis import Diagnosis, Status
from rm_optimizer.records.locations import CODE_FILE
from rm_optimizer.records.run_folder import METRICS_FILE, RESULT_FILE, PairReward, RunFolder
from rm_optimizer.reporting import figures
from rm_optimizer.reporting.tables import Cell, group_table, metrics_rows, output_console, print_line, summary_table
from rm_optimizer.training.folder.record import TOY_WARNING, RunResult, is_toy

PICTURES = "plots"
CHANCE_LOSS = math.log(2)
CURVATURE = "curvature_top_eigenvalue"
TRACE, SHARPNESS, LIMIT = "curvature_trace", "curvature_preconditioned_sharpness", "curvature_stability_limit"
"""Columns of `metrics.csv` in a run with `training.hessian.enabled`."""
_STYLES = {Status.ok: "green", Status.warn: "yellow", Status.fail: "bold red", Status.skipped: "dim"}


def draw_run(result: RunResult) -> Path:
    """Draw loss, accuracy, reliability and margins of a finished run into its folder `plots/`."""
    run_dir = Path(result.run_dir)
    history = RunFolder(run_dir).metrics()
    figures.save_figure(plot_loss(history), run_dir / PICTURES / "loss.png")
    figures.save_figure(plot_accuracy(history, ceiling=result.data.ceiling), run_dir / PICTURES / "accuracy.png")
    return draw_evaluation(run_dir, result.metrics)


def draw_evaluation(folder: Path, metrics: PairwiseMetrics) -> Path:
    """Draw reliability and margins of an evaluation into `plots/` of its folder."""
    draw_reliability(metrics, folder / PICTURES / "reliability.png")
    figures.save_figure(plot_margins(margins_of(RunFolder(folder).pair_rewards())), folder / PICTURES / "margins.png")
    return folder / PICTURES


def draw_reliability(metrics: PairwiseMetrics, png: Path) -> Path:
    """Write the reliability picture of an evaluation and return its file."""
    return figures.save_figure(plot_reliability(metrics), png)[0]


def plot_loss(history: figures.History) -> Figure:
    """Training and validation loss over optimizer steps, with chance (log 2) marked.

    Args:
        history: rows with `step`, `train_loss` and `eval_loss`.
    """
    figure, (axes,) = figures.new_figure("Loss", _history_caption(history, "train_loss"))
    axes.chance(CHANCE_LOSS, "chance, log 2")
    training, _, validation = _draw_courses(axes, history, "train_loss", "eval_loss")
    # around most of the curve and chance, so that neither a spike nor 0 flattens the rest
    ends = [CHANCE_LOSS, *(np.quantile(training, [0.02, 0.98]) if len(training) else []), *validation]
    low, high = float(min(ends)), float(max(ends))
    margin = 0.12 * max(high - low, 0.01 * high)
    axes.set(ylabel="loss (nats a pair)", ylim=(max(low - margin, 0.0), high + margin))
    figures.draw_legend(axes)
    return figure


def plot_accuracy(history: figures.History, *, ceiling: float | None = None) -> Figure:
    """Training and validation accuracy over optimizer steps, with chance and the world's ceiling marked.

    Args:
        history: rows with `step`, `train_acc` and `eval_acc`.
        ceiling: accuracy of the gold reward of a synthetic world; none is drawn where it is unknown.
    """
    figure, (axes,) = figures.new_figure("Pairwise accuracy", _history_caption(history, "train_acc"))
    if ceiling is not None:
        axes.guide(
            f"ceiling {ceiling:.3f} (gold reward)", y=ceiling, color=figures.GREEN, linestyle="--", linewidth=1.4
        )
    axes.chance(0.5)
    _, smoothed, validation = _draw_courses(axes, history, "train_acc", "eval_acc")
    lowest = math.floor(10 * min([0.5, *smoothed, *validation])) / 10 - 0.1
    axes.set(ylabel="accuracy, ties one half", ylim=(max(0.0, lowest), 1.0))
    figures.draw_legend(axes, "lower right")
    return figure


def plot_reliability(metrics: PairwiseMetrics) -> Figure:
    """Frequency by confidence with 95 % intervals.

    Below is the number of pairs in each bin.
    """
    bins = metrics.reliability
    caption = f"ECE {metrics.ece}, noise floor {metrics.ece_noise_floor:.3f}; n = {metrics.num_pairs:,} pairs"
    caption = metrics.collapse.reason or caption
    figure, (axes, strip) = figures.new_figure("Reliability", caption, ratios=(5, 1), height=5.2)
    figures.draw_reliability_bins(axes, bins, "perfectly calibrated", "model, 95% interval")
    bottom = min(0.4, math.floor(10 * min(item.frequency_low for item in bins)) / 10)
    axes.set(xlim=(0.495, 1.005), ylim=(bottom, 1.02))
    axes.set(ylabel="how often that side was the better one")
    figures.draw_legend(axes)
    middles, counts = [(item.low + item.high) / 2 for item in bins], [item.num_pairs for item in bins]
    strip.bars(middles, counts, width=[0.94 * (item.high - item.low) for item in bins], color=figures.LIGHT)
    for middle, count in zip(middles, counts, strict=True):
        strip.annotate(f"{count:,}", (middle, count), ha="center", va="bottom", fontsize=8)
    strip.margins(y=0.35)
    strip.set_yticks([])
    strip.grid(False)
    strip.spines["left"].set_visible(False)
    strip.set(xlabel="probability of the side the model prefers", ylabel="pairs")
    return figure


def margins_of(rows: Sequence[PairReward]) -> Float[np.ndarray, " pairs"]:
    """Reward of the better response less the other's, for every pair.

    Pairs without a better one are left out, unless there are no others.
    """
    margins = np.array([row.chosen - row.rejected for row in rows])
    side = np.sign(np.array([row.label for row in rows]) - 0.5)
    return (margins * side)[side != 0] if (side != 0).any() else margins


def plot_margins(margins: Float[np.ndarray, " pairs"]) -> Figure:
    """Histogram of the margins, with wrongly ranked pairs in another color and ties marked.

    Args:
        margins: reward of the better response minus the reward of the other.

    Raises:
        ValueError: if there are no margins.
    """
    if margins.size == 0:
        raise ValueError("margins must hold at least one pair, got none")
    wrong, tied = float((margins < 0).mean()), float((margins == 0).mean())
    caption = f"ranked wrongly {wrong:.1%}, tied {tied:.1%}, mean {margins.mean():.3g}; n = {margins.size:,} pairs"
    figure, (axes,) = figures.new_figure("Reward margins", caption)
    # equal bins, one of whose edges is 0, over all but the outermost margins
    low, high = np.quantile(margins, [0.002, 0.998])
    low, high = min(low, 0.0), max(high, 0.0)
    width = (high - low) / min(40, 10 + math.isqrt(margins.size)) if high > low else 0.05
    edges = width * np.arange(math.floor(low / width) - 1, math.ceil(high / width) + 2)
    hidden = int(((margins < edges[0]) | (margins > edges[-1])).sum())
    axes.guide(x=0.0)
    for members, color, word in ((margins > 0, figures.BLUE, "rightly"), (margins < 0, figures.ORANGE, "wrongly")):
        if members.any():
            counts, _ = np.histogram(margins[members], edges)
            label = f"ranked {word} ({members.mean():.1%})"
            axes.bars((edges[:-1] + edges[1:]) / 2, counts, label, width=np.diff(edges), color=color)
    if tied:
        num_tied = int((margins == 0).sum())
        axes.vlines(0.0, 0, num_tied, color=figures.INK, linewidth=5, label=f"tied ({tied:.1%}, {num_tied:,} pairs)")
        axes.marks.append(figures.Mark("tied", 0.0, num_tied))
    median = float(np.median(margins))
    axes.guide(f"median {median:.3g}", x=median, color=figures.INK, linewidth=1.2, linestyle=":")
    beyond = f"; {hidden:,} pairs lie beyond" if hidden else ""
    axes.set(xlabel=f"margin: reward of the better response − reward of the other{beyond}", ylabel="pairs")
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)
    figures.count_ticks(axes.yaxis)
    figures.draw_legend(axes)
    return figure


def _column(history: figures.History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows with a finite number in the column."""
    steps, values = figures.numbers(history, "step"), figures.numbers(history, name)
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _draw_courses(
    axes: figures.Panel, history: figures.History, training: str, validation: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a column of training batches smoothed, and a column of validations.

    Steps of less than half a batch are left out. They may end an epoch, and their noise looks like a jump.

    Returns:
        Values of the training batches, the same smoothed, and values of the validations.
    """
    sizes = np.nan_to_num(figures.numbers(history, "train_pairs"))
    is_whole = (sizes <= 0) | (sizes >= sizes.max(initial=0.0) / 2)
    steps, values = _column([row for row, is_kept in zip(history, is_whole, strict=True) if is_kept], training)
    # centered moving average; at the ends, over the part of the window that exists
    half_width, index = _half_width(len(steps)), np.arange(len(values))
    totals = np.concatenate([[0.0], np.cumsum(values)])
    start, end = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    smoothed = np.asarray((totals[end] - totals[start]) / (end - start))
    if half_width:
        axes.curve(steps, values, color=figures.BLUE, alpha=0.22, linewidth=0.8)
    if len(steps):
        marker = "o" if len(steps) == 1 else None
        axes.curve(steps, smoothed, "training", color=figures.BLUE, linewidth=1.8, marker=marker)
    at, found = _column(history, validation)
    if len(at):
        label = f"validation (last {found[-1]:.3f})"
        axes.curve(at, found, label, color=figures.VERMILION, linewidth=1.8, marker="o", markersize=4.5)
    last = max([1.0, *figures.numbers(history, "step")])
    axes.set(xlabel="optimizer step", xlim=(-0.02 * last, 1.02 * last))
    figures.count_ticks(axes.xaxis)
    return values, smoothed, found


def _half_width(num_rows: int) -> int:
    return num_rows // 50


def _history_caption(history: figures.History, name: str) -> str:
    steps, values = _column(history, name)
    half_width, last = _half_width(len(values)), int(steps[-1]) if len(steps) else 0
    pairs = _column(history, "eval_pairs")[1]
    validation = f"; validation on n = {int(pairs[-1]):,} pairs" if len(pairs) else ""
    window = f"; training: mean of {2 * half_width + 1} batches (pale: each)" if half_width else ""
    return f"{last:,} optimizer {'step' if last == 1 else 'steps'}{window}{validation}"


def has_training_curvature(history: figures.History) -> bool:
    """True if a run measured its curvature."""
    return any(row.get(CURVATURE) not in ("", None) for row in history)


def training_rows(history: figures.History) -> list[dict[str, Any]]:
    """Rows of the curvature that a run logged."""
    rows: list[dict[str, Any]] = []
    for row in history:
        if values := {name: float(cell) for name, cell in row.items() if name.startswith("curvature_") and cell}:
            rows.append({"step": int(row["step"] or 0), **values})
    return rows


def curvature_caption(run: RunFolder) -> str:
    """Sample of the curvature that a run measured during training."""
    result = RunResult.read(run.path)
    trained = run.options or (result.config if result else {})
    num_pairs = trained["training"]["hessian"]["num_pairs"]
    if result is not None:
        num_pairs = min(num_pairs, result.data.train_pairs)
    return f"n = {num_pairs:,} training pairs; seed {trained['seed']}"


def plot_training_curvature(history: figures.History, *, caption: str) -> Figure:
    """Lower bound of the top eigenvalue, trace with its standard error, and the edge of stability over a run's steps.

    The residual is not drawn, since it gives no upper bound on the top eigenvalue. The limit of stability is drawn with
    the preconditioned sharpness if the optimizer has a preconditioner, else with the top eigenvalue.

    Args:
        history: rows of `metrics.csv` with the columns of `training.hessian.enabled`.
        caption: pairs, seed.
    """
    rows = [row for row in history if row.get(CURVATURE) not in ("", None)]
    sharp = [row for row, value in zip(rows, figures.numbers(rows, SHARPNESS), strict=True) if math.isfinite(value)]
    courses = [
        ("top eigenvalue", CURVATURE, "top eigenvalue, at least", figures.VERMILION, rows),
        ("trace", TRACE, "trace; bar: standard error", figures.BLUE, rows),
        ("preconditioned", SHARPNESS, "preconditioned sharpness, at least", figures.GREEN, sharp),
    ][: 3 if sharp else 2]
    height = 1.4 + 1.9 * len(courses)
    figure, panels = figures.new_figure("Curvature during training", caption, ratios=(1,) * len(courses), height=height)
    for axes, (title, name, label, color, part) in zip(panels, courses, strict=True):
        steps, values, limits = (figures.numbers(part, each) for each in ("step", name, LIMIT))
        axes.curve(steps, values, label, error=figures.numbers(part, f"{name}_standard_error"), color=color)
        axes.guide(y=0.0, linewidth=0.8)
        figures.count_ticks(axes.xaxis)
        has_limit = np.isfinite(limits)
        if name == (SHARPNESS if sharp else CURVATURE) and has_limit.any():
            values, limits = values[has_limit], limits[has_limit]
            dashed: dict[str, Any] = {"color": figures.INK, "linestyle": (0, (5, 3)), "linewidth": 1.4, "marker": "_"}
            axes.curve(steps[has_limit], limits, "limit of stability", **dashed)
            sizes = np.abs([*limits, *values])
            if min(values) > 0 and max(sizes) > 20 * max(min(sizes), 1e-12):  # the limit is far from the values
                axes.set_yscale("log")
                axes.set_ylim(min(values) / 3, 3 * max(*limits, *values))
        axes.set_ylabel(title)
        figures.draw_legend(axes, "above")
    panels[-1].set_xlabel("optimizer step")
    return figure


def print_run(result: RunResult, console: Console | None = None) -> None:
    """Print the run's summary table, and the next steps."""
    console = console or output_console()
    data = result.data
    rows: dict[str, Cell] = {"validation": data.val_origin, **metrics_rows(result.metrics)}
    if data.ceiling is not None:
        rows["ceiling (gold reward)"] = data.ceiling
    rows["training pairs"] = data.train_pairs
    rows["steps (best)"] = f"{result.steps:,} ({result.best_step:,})"
    rows["pairs/s"] = "n/a" if result.pairs_per_second is None else result.pairs_per_second
    console.print(summary_table(f"{result.model}, {result.optimizer}, seed {result.seed}: {result.ending}", rows))
    for column in result.metrics.groups:
        console.print(group_table(result.metrics, column))
    for note in data.notes:
        print_line(f"  note: {note}", console)
    if is_toy(result.config["model"]["path"], result.config["data"]["train"]):
        print_line(f"  warning: {TOY_WARNING % result.model}", console)
    run_dir, export = (os.path.relpath(path) for path in (result.run_dir, result.export))
    typed = shlex.quote(f"./{export}" if export.startswith("-") else export)
    trusted = " with trust_remote_code=True" if (Path(result.export) / CODE_FILE).is_file() else ""
    lines = {
        "model": f"{export}  (AutoModelForSequenceClassification.from_pretrained loads it{trusted})",
        "pictures": f"{run_dir}/{PICTURES}",
        "numbers": f"{run_dir}/{RESULT_FILE}, {run_dir}/{METRICS_FILE}",
        "score": f'rm-opt score {typed} --prompt "…" --response "…"',
        "evaluate": f"rm-opt evaluate {typed} --data PAIRS.jsonl",
    }
    for name, line in lines.items():
        print_line(f"{name:>9}: {line}", console)


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None, *, show_all: bool = False) -> None:
    """Print the checks of a diagnosis, and the verdict.

    There is a row for each check that is not ok, and a line for checks that passed or were skipped.
    """
    table = Table(title=Text(f"Doctor: {diagnosis.model}", "bold"), title_justify="left", header_style="bold")
    for name in ("", "check", "measured", "what it means"):
        table.add_column(Text(name), no_wrap=name == "check")
    hidden = {Status.skipped} if show_all else {Status.skipped, Status.ok}
    for check in diagnosis.checks:
        if check.status not in hidden:
            value = check.measured
            found = "n/a" if value is None else value if isinstance(value, str) else f"{value:.4g}"
            measured = "n/a" if value is None else f"{found} {check.unit}".strip()
            status = Text(check.status, _STYLES[check.status])
            table.add_row(status, Text(check.name), Text(measured), Text(check.explanation))
    head = [table] if table.row_count else [Text(f"Doctor: {diagnosis.model}", "bold")]
    num_ok = len(diagnosis.names(Status.ok))
    fine = [] if show_all else [Text(f"{num_ok} checks ok (--all shows them)", _STYLES[Status.ok])]
    reasons: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        if check.status is Status.skipped:
            reasons.setdefault(check.explanation, []).append(check.name)
    skipped = [Text(f"skipped {', '.join(names)}: {reason}", "dim") for reason, names in reasons.items()]
    audited, scored = diagnosis.num_pairs_audited, diagnosis.num_pairs_scored
    samples = [
        Text(
            f"{name}: {total:,} pairs, {audited.get(name, 0):,} audited, {scored.get(name, 0):,} scored "
            f"(seed {diagnosis.seed})"
        )
        for name, total in diagnosis.num_pairs.items()
    ]
    bad = {"failed": diagnosis.names(Status.fail), "warn": diagnosis.names(Status.warn)}
    parts = [f"{len(names)} {word} ({', '.join(names)})" for word, names in bad.items() if names]
    said = "; ".join(parts) or "nothing found that breaks a reward model"
    verdict = f"verdict: {diagnosis.verdict} in {diagnosis.wall_seconds:.1f} s: {said}"
    shown = Group(*head, *fine, *skipped, *samples, Text(verdict, _STYLES[diagnosis.verdict]))
    (console or output_console()).print(shown)
