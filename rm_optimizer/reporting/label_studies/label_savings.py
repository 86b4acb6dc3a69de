"""Tables, pictures and files of a label-savings study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.data_efficiency.savings.label_savings import LabelSavings
from rm_optimizer.data_efficiency.savings.label_study import PLACEBO, RANDOM, curves
from rm_optimizer.records.files import write_rows, write_text
from rm_optimizer.reporting.style import BLUE, GRAY, SERIES, captioned_figure, draw_legend, save_figure
from rm_optimizer.reporting.tables import TextTable, output_console

SAVINGS_FILE = "savings.json"
_DRAWN = 4
"""Number of rules whose learning curves are drawn beside the random draw's."""


def write_savings(found: Sequence[LabelSavings], rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write `savings.json`, `savings.parquet` and two pictures for each pool.

    Args:
        found: savings of each pool.
        rows: rows of the study, which the learning curves are drawn from.
        folder: folder of the files.
    """
    write_text(folder / SAVINGS_FILE, "[" + ",\n".join(pool.to_json() for pool in found) + "]\n")
    table = [
        {"pool": pool.pool, "budget": pool.budget, "rule": rule.rule, "num_splits": pool.num_splits}
        | {"saving": rule.saving.value, "saving_low": rule.saving.low, "saving_high": rule.saving.high}
        | {"accuracy_gain": rule.accuracy_gain.value, "nll_gain": rule.nll_gain.value}
        for pool in found
        for rule in pool.rules
    ]
    write_rows(folder / "savings.parquet", table)
    for pool in found:
        _draw_pool(pool, rows_of_pool(rows, pool), folder)


def _draw_pool(pool: LabelSavings, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    stem = "".join(letter if letter.isalnum() else "_" for letter in pool.pool)
    save_figure(plot_learning_curves(pool, *curves(rows, "accuracy")), folder / f"{stem}.curves.png")
    save_figure(plot_savings(pool), folder / f"{stem}.savings.png")


def rows_of_pool(rows: Sequence[Mapping[str, Any]], pool: LabelSavings) -> list[Mapping[str, Any]]:
    """Rows of a study that belong to a pool and are finished."""
    return [row for row in rows if row["state"] == "finished" and row["pool"] == pool.pool]


def print_savings(found: Sequence[LabelSavings], console: Console | None = None) -> None:
    """Print a table for each pool, with a warning below if the placebo refutes it.

    Args:
        found: savings of each pool.
        console: destination; None is standard output.
    """
    console = console or output_console()
    for pool in found:
        console.print(savings_table(pool).drawn())
        if not pool.is_accepted:
            console.print(f"warning: {placebo_warning(pool)}", markup=False, highlight=False, soft_wrap=True)


def savings_table(pool: LabelSavings) -> TextTable:
    """Table with a row for each rule of a pool: saved labels, and gains at the budget, with intervals."""
    rows = tuple(
        (
            f"{rule.rule} (placebo)" if rule.rule == PLACEBO else rule.rule,
            f"{rule.saving:.0%}",
            f"{100 * rule.accuracy_gain.value:+.2f} [{_points(rule.accuracy_gain.low)}, "
            f"{_points(rule.accuracy_gain.high)}]",
            f"{rule.nll_gain:+.4f}",
        )
        for rule in pool.rules
    )
    title = f"{pool.pool}: labels saved at {pool.budget:,} labels, {pool.num_splits} splits"
    return TextTable(title, ("rule", "saving", "accuracy, points", "NLL, nats"), rows)


def placebo_warning(pool: LabelSavings) -> str:
    """Warning about a pool that its placebo refutes."""
    return (
        f"in '{pool.pool}' the second random draw 'saves' {_placebo(pool):.0%}, which is not nothing; no saving of "
        "this pool is shown; add splits, or a pool with more to learn"
    )


def plot_learning_curves(pool: LabelSavings, labels: Sequence[int], accuracy: Mapping[str, np.ndarray]) -> Figure:
    """Mean test accuracy over the number of labels: the random draw, the four best rules, and the placebo.

    Args:
        pool: savings of the pool.
        labels: numbers of labels.
        accuracy: accuracy of each rule over splits and numbers of labels.
    """
    caption = f"{pool.num_splits} splits, mean test accuracy; dotted: the {pool.budget:,} labels of the comparison"
    figure, (axes,) = captioned_figure(f"Accuracy by labels: {pool.pool}", caption)
    best = [rule.rule for rule in pool.rules if rule.rule != PLACEBO][:_DRAWN]
    for rule, color in zip(best, SERIES, strict=False):
        axes.plot(labels, accuracy[rule].mean(axis=0), color=color, marker="o", markersize=3, label=rule)
    axes.plot(labels, accuracy[RANDOM].mean(axis=0), color=GRAY, marker="o", markersize=3, label="random")
    axes.plot(labels, accuracy[PLACEBO].mean(axis=0), color=GRAY, linestyle="--", label="random again (placebo)")
    axes.axvline(pool.budget, color=GRAY, linestyle=":", linewidth=1.0)
    axes.set_xscale("log", base=2)
    ticks = [number for number in labels if number in (labels[0], *(labels[0] * 2**power for power in range(1, 20)))]
    axes.set_xticks(ticks, [f"{number:,}" for number in ticks])
    axes.set(xlabel="labels", ylabel="test accuracy")
    draw_legend(axes, "lower right")
    return figure


def plot_savings(pool: LabelSavings) -> Figure:
    """Saving of every rule with its interval; a rule that never reaches the random draw's accuracy is at −100 %.

    Args:
        pool: savings of the pool.
    """
    verdict = "" if pool.is_accepted else "; not accepted: the placebo is not near 0"
    caption = f"{pool.num_splits} splits; bars: 95% intervals over splits{verdict}"
    figure, (axes,) = captioned_figure(f"Labels saved at {pool.budget:,}: {pool.pool}", caption)
    rules = pool.rules[::-1]
    for place, rule in enumerate(rules):
        low, high = rule.saving.low or 0.0, rule.saving.high or 0.0
        color = GRAY if rule.rule == PLACEBO else BLUE
        axes.plot([100 * low, 100 * high], [place, place], color=color, linewidth=1.5)
        axes.plot(100 * rule.saving.value, place, "o", color=color, markersize=5)
    axes.axvline(0.0, color=GRAY, linewidth=1.0)
    names = ["random again (placebo)" if rule.rule == PLACEBO else rule.rule for rule in rules]
    axes.set_yticks(range(len(rules)), names)
    axes.set_xlim(-105, 105)
    axes.set_xlabel("labels saved at equal accuracy (%)")
    return figure


def _points(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:+.2f}"


def _placebo(pool: LabelSavings) -> float:
    return next(rule.saving.value for rule in pool.rules if rule.rule == PLACEBO)
