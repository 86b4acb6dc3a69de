"""The pictures and the table of a finished run or evaluation, from the files it left."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console

from rm_optimizer.core.metrics import PairwiseMetrics
from rm_optimizer.reporting.plots import History, plot_accuracy, plot_loss, plot_margins, plot_reliability
from rm_optimizer.reporting.tables import Cell, group_table, metrics_rows, summary_table
from rm_optimizer.training.result import RunResult


def draw_run(result: RunResult) -> list[Path]:
    """Draw loss, accuracy, reliability and margins into `plots/` of the run folder."""
    folder = Path(result.run_dir)
    plots = folder / "plots"
    history = read_history(folder / "metrics.csv")
    return [
        plot_loss(history, plots / "loss.png"),
        plot_accuracy(history, plots / "accuracy.png", ceiling=result.data.ceiling),
        *draw_evaluation(result.metrics, folder / "pair_rewards.jsonl", plots),
    ]


def draw_evaluation(metrics: PairwiseMetrics, pair_rewards: Path, plots: Path) -> list[Path]:
    """Draw reliability and margins of one evaluation into a folder."""
    plots.mkdir(parents=True, exist_ok=True)
    return [
        plot_reliability(metrics, plots / "reliability.png"),
        plot_margins(read_margins(pair_rewards), plots / "margins.png"),
    ]


def print_run(result: RunResult, console: Console | None = None) -> None:
    """Print the summary of a run and where to look next."""
    rows: dict[str, Cell] = metrics_rows(result.metrics)
    if result.data.ceiling is not None:
        rows |= {"accuracy of the world's gold reward": result.data.ceiling}
    rows |= {
        "accuracy of \"longer wins\"": result.data.length_baseline,
        "validation": result.data.val_origin,
        "best step / steps": f"{result.best_step:,} / {result.steps:,}",
        "seconds": f"{result.wall_seconds:.0f}",
    }  # fmt: skip
    out = console or Console()
    out.print(summary_table(f"{result.model} with {result.optimizer}, held-out pairs", rows))
    if "source" in result.metrics.groups:
        out.print(group_table(result.metrics, "source"))
    out.print(f"model    {result.export}", soft_wrap=True, highlight=False)
    out.print(f"metrics  {Path(result.run_dir) / 'run.json'}", soft_wrap=True, highlight=False)
    out.print(f"plots    {Path(result.run_dir) / 'plots'}", soft_wrap=True, highlight=False)
    out.print(f"try it   rm-opt score {result.export} --prompt … --response …", soft_wrap=True, highlight=False)


def print_evaluation(title: str, metrics: PairwiseMetrics, console: Console | None = None) -> None:
    """Print the metrics of one evaluation, and of its groups."""
    out = console or Console()
    out.print(summary_table(title, metrics_rows(metrics)))
    for column in metrics.groups:
        out.print(group_table(metrics, column))


def read_history(path: Path) -> History:
    """Rows of `metrics.csv`."""
    with path.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def read_margins(path: Path) -> Float[np.ndarray, " pairs"]:
    """Chosen less rejected of each line of `pair_rewards.jsonl`."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return np.array([row["chosen"] - row["rejected"] for row in rows])
