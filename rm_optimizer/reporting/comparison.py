"""Tables, pictures and files of a comparison of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rm_optimizer.experiments.run_comparison import COSTS, ArmScores, RunComparison, RunScores
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.records.files import write_rows, write_text
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.comparison_plots import plot_differences, plot_learning_curves, plot_spectra
from rm_optimizer.reporting.style import save_figure
from rm_optimizer.reporting.tables import Cell, cell_text, new_table, output_console

COMPARISON_FILE = "comparison.json"
SCORE_NAMES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
MATRICES = ("hessian", "gauss_newton", "fisher")
"""Analyses whose spectra are overlaid, by priority; the first one that two runs have is drawn."""
_MOST_COLUMNS = 5
"""Most arms for which a table of differing options has one column for each arm."""


def print_comparison(comparison: RunComparison, console: Console | None = None) -> None:
    """Print the tables of a comparison, and notes on how to read them.

    Args:
        comparison: the comparison.
        console: destination; None is standard output.
    """
    console = console or output_console()
    console.print(_score_table(comparison))
    if comparison.differences:
        console.print(_difference_table(comparison))
    if comparison.arms[0].options:
        console.print(_option_table(comparison.arms))
    console.print(_cost_table(comparison))
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def write_comparison(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write `comparison.json`, `comparison.parquet` and the pictures, each file completely or not at all.

    Args:
        comparison: the comparison.
        folder: folder of the files.

    Returns:
        The written files. Pictures of an earlier comparison are removed.
    """
    for stale in ("differences", "spectra"):
        (folder / f"{stale}.png").unlink(missing_ok=True)
    files = [write_text(folder / COMPARISON_FILE, comparison.to_json() + "\n")]
    files.append(write_rows(folder / "comparison.parquet", comparison.rows()))
    histories = {
        arm.name: [RunFolder(Path(run.folder)).metrics() for run in _runs(comparison, arm)] for arm in comparison.arms
    }
    same_pairs = {run.num_pairs for run in comparison.runs} == {comparison.num_pairs}
    files += save_figure(plot_learning_curves(histories, same_pairs=same_pairs), folder / "curves.png")
    if comparison.differences:
        files += save_figure(plot_differences(comparison), folder / "differences.png")
    if spectra := spectra_of(comparison.runs):
        files += save_figure(plot_spectra(spectra), folder / "spectra.png")
    return files


def spectra_of(runs: Sequence[RunScores]) -> dict[str, HessianSpectrum]:
    """Spectra of the runs' best weights by run, for the first of `MATRICES` that two runs have; empty without one.

    Spectra over other parameters than in the first run are left out.
    """
    for matrix in MATRICES:
        found: dict[str, HessianSpectrum] = {}
        for run in runs:
            path = RunFolder(Path(run.folder)).landscape(run.folder, matrix) / f"{matrix}.json"
            spectrum = _spectrum(path)
            first = next(iter(found.values()), spectrum)
            if spectrum is None or first is None:
                continue
            if (spectrum.params, spectrum.num_parameters) == (first.params, first.num_parameters):
                found[run.name] = spectrum
        if len(found) > 1:
            return found
    return {}


def _spectrum(path: Path) -> HessianSpectrum | None:
    try:
        return HessianSpectrum.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None


def _runs(comparison: RunComparison, arm: ArmScores) -> list[RunScores]:
    return [run for run in comparison.runs if run.arm == arm.name]


def _score_table(comparison: RunComparison) -> Table:
    count, prompts = f"{comparison.num_pairs:,}", f"{comparison.num_prompts:,}"
    title = f"{len(comparison.runs)} runs on {count} common validation pairs of {prompts} prompts, 95 % intervals"
    table = new_table(title, "arm", "run", "seed", *SCORE_NAMES.values())
    for column in table.columns[1:2]:
        column.justify = "left"
    for arm in comparison.arms:
        runs = _runs(comparison, arm)
        for run in runs:
            scores: Mapping[str, Cell] = run.scores | ({"accuracy": "collapsed"} if run.collapse else {})
            cells = (cell_text(scores[name]) for name in SCORE_NAMES)
            table.add_row(Text(arm.name if run is runs[0] else ""), Text(run.name), Text(str(run.seed)), *cells)
        if len(runs) > 1:
            means = (f"{arm.scores[name]}, sd {arm.deviations[name]:.3f}" for name in SCORE_NAMES)
            table.add_row(Text(""), Text(f"mean of {len(runs)} seeds", "bold"), Text(""), *map(Text, means))
    for lost in comparison.diverged:
        table.add_row(Text(lost.arm), Text(lost.name), Text(str(lost.seed)), Text("diverged"))
    return table


def _difference_table(comparison: RunComparison) -> Table:
    table = new_table(
        f"Difference to {comparison.baseline}, paired by prompt and seed", "arm", "seeds", *SCORE_NAMES.values()
    )
    for arm in comparison.arms[1:]:
        found = {item.score: item for item in comparison.differences if item.arm == arm.name}
        items = [found[name] for name in SCORE_NAMES]
        cells = (
            Text(f"{item.estimate:+.3f} {item.verdict}".rstrip(), "bold" if item.verdict else "") for item in items
        )
        table.add_row(Text(arm.name), Text(str(found["nll"].num_seeds)), *cells)
    return table


def _option_table(arms: Sequence[ArmScores]) -> Table:
    """Options in which arms differ: a row for each option, or a row for each arm if there are many."""
    options = list(arms[0].options)
    values = {
        arm.name: [
            "-" if value is None else value if isinstance(value, str) else json.dumps(value)
            for value in arm.options.values()
        ]
        for arm in arms
    }
    if len(arms) <= _MOST_COLUMNS:
        table = new_table("Options in which they differ", "option", *values)
        for index, name in enumerate(options):
            table.add_row(Text(name), *(Text(row[index]) for row in values.values()))
        return table
    table = new_table("Options in which they differ", "arm", *options)
    for name, row in values.items():
        table.add_row(Text(name), *map(Text, row))
    return table


def _cost_table(comparison: RunComparison) -> Table:
    table = new_table("Cost, mean over runs", "arm", "steps", "best step", "seconds", "pairs/s", "trained parameters")
    for arm in comparison.arms:
        costs = [run.costs for run in _runs(comparison, arm)]

        def mean(name: str, costs: list[dict[str, float | None]] = costs) -> float | None:
            known = [value for each in costs if (value := each[name]) is not None]
            return fmean(known) if known else None

        numbers = [mean(name) for name in COSTS]
        cells = ("n/a" if number is None else f"{number:,.1f}".removesuffix(".0") for number in numbers)
        table.add_row(Text(arm.name), *map(Text, cells))
    return table
