"""Pictures and summary of a run or an evaluation, from the files in its folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.evaluation.saved_model import Evaluation
from rm_optimizer.records.run_folder import METRICS_FILE, RESULT_FILE, PairReward, RunFolder
from rm_optimizer.reporting.plots import plot_accuracy, plot_loss, plot_margins, plot_reliability
from rm_optimizer.reporting.style import save_figure
from rm_optimizer.reporting.tables import (
    Cell,
    evaluation_rows,
    group_table,
    metrics_rows,
    output_console,
    summary_table,
)
from rm_optimizer.training.folder.result import TOY_WARNING, RunResult, is_toy

PICTURES = "plots"


def draw_run(result: RunResult) -> Path:
    """Draw loss, accuracy, reliability and margins of a finished run into its folder `plots/`."""
    run_dir = Path(result.run_dir)
    history = RunFolder(run_dir).metrics()
    save_figure(plot_loss(history), run_dir / PICTURES / "loss.png")
    save_figure(plot_accuracy(history, ceiling=result.data.ceiling), run_dir / PICTURES / "accuracy.png")
    return draw_evaluation(run_dir, result.metrics)


def draw_evaluation(folder: Path, metrics: PairwiseMetrics) -> Path:
    """Draw reliability and margins of an evaluation into `plots/` of its folder."""
    draw_reliability(metrics, folder / PICTURES / "reliability.png")
    save_figure(plot_margins(margins_of(RunFolder(folder).pair_rewards())), folder / PICTURES / "margins.png")
    return folder / PICTURES


def draw_reliability(metrics: PairwiseMetrics, png: Path) -> Path:
    """Write the reliability picture of an evaluation and return its file."""
    return save_figure(plot_reliability(metrics), png)[0]


def print_evaluation(title: str, evaluation: Evaluation, console: Console | None = None) -> None:
    """Print one evaluation, and the metrics of its groups."""
    console = console or output_console()
    console.print(summary_table(title, evaluation_rows(evaluation)))
    for column in evaluation.metrics.groups:
        console.print(group_table(evaluation.metrics, column))


def margins_of(rows: Sequence[PairReward]) -> Float[np.ndarray, " pairs"]:
    """Reward of the better response less the other's, for every pair with a better one; for all pairs if none has."""
    margins = np.array([row.chosen - row.rejected for row in rows])
    side = np.sign(np.array([row.label for row in rows]) - 0.5)
    return (margins * side)[side != 0] if (side != 0).any() else margins


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
        console.print(f"  note: {note}", markup=False, highlight=False, soft_wrap=True)
    if is_toy(result.config["model"]["path"], result.config["data"]["train"]):
        console.print(f"  warning: {TOY_WARNING % result.model}", markup=False, highlight=False, soft_wrap=True)
    _print_next(result, console)


def _print_next(result: RunResult, console: Console) -> None:
    run_dir, export = (os.path.relpath(path) for path in (result.run_dir, result.export))
    typed = shlex.quote(f"./{export}" if export.startswith("-") else export)
    lines = {
        "model": f"{export}  (AutoModelForSequenceClassification.from_pretrained loads it)",
        "pictures": f"{run_dir}/{PICTURES}",
        "numbers": f"{run_dir}/{RESULT_FILE}, {run_dir}/{METRICS_FILE}",
        "score": f'rm-opt score {typed} --prompt "…" --response "…"',
        "evaluate": f"rm-opt evaluate {typed} --data PAIRS.jsonl",
    }
    for name, line in lines.items():
        console.print(f"{name:>9}: {line}", markup=False, highlight=False, soft_wrap=True)
