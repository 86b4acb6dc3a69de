"""Tables, pictures, files and page of a comparison of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.experiments.compared_runs import read_runs
from rm_optimizer.experiments.run_comparison import COSTS, ArmScores, RunComparison, RunScores, compare_runs
from rm_optimizer.records.files import write_rows, write_text
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.figures import (
    History,
    count_ticks,
    draw_differences,
    draw_legend,
    draw_seeds,
    new_figure,
    numbers,
    save_figure,
    series_line,
)
from rm_optimizer.reporting.html import sentence
from rm_optimizer.reporting.run_report import CHANCE_LOSS
from rm_optimizer.reporting.tables import SCORE_NAMES, TextTable, print_tables

if TYPE_CHECKING:
    from rm_optimizer.landscape.spectrum import HessianSpectrum

COMPARISON_FILE = "comparison.json"
MATRICES = ("hessian", "gauss_newton", "fisher")
"""Analyses whose spectra are overlaid, by priority; the first one that two runs have is drawn."""
_CAPTIONS = {
    "curves": "Validation NLL and accuracy by training step or pairs, a line for each arm",
    "differences": "Differences to the baseline in accuracy and NLL, with intervals",
    "spectra": "Largest eigenvalues of each run, and their densities if they were estimated",
}
_MOST_COLUMNS = 5
"""Most arms for which a table of differing options has one column for each arm."""
_MOST_NAMED = 12
"""Most arms in a legend; further arms are drawn without a name."""


def sweep_document(folder: Path) -> Document:
    """Page of the runs in a folder, such as a sweep's.

    Differences in NLL come first, then scores, options, costs and curves.

    Raises:
        ConfigError: if the runs cannot be compared.
        DataError: if a file of a run is missing or damaged.
    """
    comparison = compare_runs(read_runs([folder]))
    tables = {name: Listing(name, table) for name, table in comparison_tables(comparison).items()}
    figures = {name: Drawing(name, figure, _CAPTIONS[name]) for name, figure in comparison_figures(comparison).items()}
    judged = [figures[name] for name in ("differences",) if name in figures]
    curves = [figures[name] for name in ("curves", "spectra") if name in figures]
    parts = (
        Part("Differences", (tables["verdicts"], *judged)),
        Part("Scores", (tables["scores"],)),
        Part("Options", (tables["options"],)),
        Part("Learning curves and spectra" if "spectra" in figures else "Learning curves", tuple(curves)),
        Part("Cost", (tables["cost"],)),
        Part("How to read it", (tuple(map(sentence, comparison.notes)),)),
    )
    baseline, found = comparison.baseline, [item for item in comparison.differences if item.score == "nll"]
    decided = [item for item in found if item.verdict]
    if not found:
        scores = comparison.arms[0].scores
        said = f"accuracy {scores['accuracy']} and NLL {scores['nll']}, mean over runs that differ only in the seed"
        answer = Answer("open", f"One arm, {len(comparison.runs)} runs", (said,))
    elif decided:
        lines = (f"in NLL, {each.arm} is {each.verdict} than {baseline}: {each.estimate:+.3f}" for each in decided)
        answer = Answer("good", f"{len(decided)} of {len(found)} differ from {baseline}", tuple(lines))
    else:
        said = f"no arm is shown to be better or worse than {baseline} in NLL"
        answer = Answer("fair", "No difference is shown", (said,))
    return Document(f"Comparison of {len(comparison.runs)} runs", answer, parts)


def print_comparison(comparison: RunComparison, console: Console | None = None) -> None:
    """Print the tables of a comparison, and notes on how to read them."""
    print_tables(comparison_tables(comparison).values(), comparison.notes, console)


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
    for name, figure in comparison_figures(comparison).items():
        files += save_figure(figure, folder / f"{name}.png")
    return files


def comparison_figures(comparison: RunComparison) -> dict[str, Figure]:
    """Figures of a comparison by name.

    Learning curves, differences if there are several arms, and spectra if two runs have one.
    """
    histories = {
        arm.name: [RunFolder(Path(run.folder)).metrics() for run in _runs(comparison, arm)] for arm in comparison.arms
    }
    same_pairs = {run.num_pairs for run in comparison.runs} == {comparison.num_pairs}
    figures = {"curves": plot_learning_curves(histories, same_pairs=same_pairs)}
    if comparison.differences:
        figures["differences"] = plot_differences(comparison)
    if spectra := spectra_of(comparison.runs):
        figures["spectra"] = plot_spectra(spectra)
    return figures


def comparison_tables(comparison: RunComparison) -> dict[str, TextTable]:
    """Scores, differences from the baseline, differing options and costs, by name."""
    labels = SCORE_NAMES.values()
    sample = f"{comparison.num_pairs:,} common validation pairs of {comparison.num_prompts:,} prompts"
    titles = {
        "scores": f"{len(comparison.runs)} runs on {sample}, 95 % intervals",
        "verdicts": f"Difference to {comparison.baseline}, paired by prompt and seed",
        "options": "Options in which they differ",
        "cost": "Cost, mean over runs",
    }
    names, options = [arm.name for arm in comparison.arms], list(comparison.arms[0].options)
    heads = {
        "scores": ("arm", "run", "seed", *labels),
        "verdicts": ("arm", "seeds", *labels),
        "options": ("option", *names) if len(names) <= _MOST_COLUMNS else ("arm", *options),
        "cost": ("arm", "steps", "best step", "seconds", "pairs/s", "trained parameters"),
    }
    rows: dict[str, list[tuple[str, ...]]] = {name: [] for name in titles}
    for arm in comparison.arms:
        runs, items = _runs(comparison, arm), [item for item in comparison.differences if item.arm == arm.name]
        for run in runs:
            scores = {name: str(run.scores[name]) for name in SCORE_NAMES}
            scores |= {"accuracy": "collapsed"} if run.collapse else {}
            rows["scores"].append((arm.name, run.name, str(run.seed), *scores.values()))
        if len(runs) > 1:
            means = (f"{arm.scores[name]}, sd {arm.deviations[name]:.3f}" for name in SCORE_NAMES)
            rows["scores"].append((arm.name, f"mean of {len(runs)} seeds", "", *means))
        if found := {item.score: item for item in items}:
            cells = (f"{found[name].estimate:+.3f} {found[name].verdict}".rstrip() for name in SCORE_NAMES)
            rows["verdicts"].append((arm.name, str(found["nll"].num_seeds), *cells))
        values = arm.options.values()
        shown = ("-" if each is None else each if isinstance(each, str) else json.dumps(each) for each in values)
        rows["options"].append((arm.name, *shown))
        known = ([cost for run in runs if (cost := run.costs[name]) is not None] for name in COSTS)
        costs = (f"{fmean(each):,.1f}".removesuffix(".0") if each else "n/a" for each in known)
        rows["cost"].append((arm.name, *costs))
    rows["scores"] += [(run.arm, run.name, str(run.seed), "diverged", "", "", "") for run in comparison.diverged]
    if heads["options"][0] == "option":  # a row for each option, or for each arm if there are many
        rows["options"] = [*zip(options, *(row[1:] for row in rows["options"]), strict=True)]
    return {name: TextTable(title, heads[name], tuple(rows[name])) for name, title in titles.items()}


def spectra_of(runs: Sequence[RunScores]) -> dict[str, HessianSpectrum]:
    """Spectra of the runs' best weights by run.

    They are of the first of `MATRICES` that two runs have; empty without one. Spectra over other parameters than in the
    first run are left out.
    """
    for matrix in MATRICES:
        found: dict[str, HessianSpectrum] = {}
        for run in runs:
            path = RunFolder(Path(run.folder)).landscape(run.folder, matrix) / f"{matrix}.json"
            if not path.is_file():
                continue
            from rm_optimizer.landscape.spectrum import HessianSpectrum  # imports torch

            try:
                spectrum = HessianSpectrum.from_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError):
                continue
            first = next(iter(found.values()), spectrum)
            if (spectrum.params, spectrum.num_parameters) == (first.params, first.num_parameters):
                found[run.name] = spectrum
        if len(found) > 1:
            return found
    return {}


def _runs(comparison: RunComparison, arm: ArmScores) -> list[RunScores]:
    return [run for run in comparison.runs if run.arm == arm.name]


def plot_learning_curves(histories: Mapping[str, Sequence[History]], *, same_pairs: bool) -> Figure:
    """Validation NLL and accuracy of each arm during training.

    There is a line for each run, and the mean over seeds on top.

    Args:
        histories: rows of the `metrics.csv` of each run, by arm.
        same_pairs: True if all runs were validated on the same pairs.
    """
    each_run = [history for runs in histories.values() for history in runs]
    sizes = {np.nan_to_num(numbers(history, "train_pairs")).max(initial=0.0) for history in each_run}
    by_pairs = len(sizes) > 1
    several = any(len(runs) > 1 for runs in histories.values())
    parts = ["validation pairs" if same_pairs else "each run on its own validation pairs"]
    parts += ["pale: each seed; strong: mean over seeds"] if several else []
    figure, axes = new_figure("Learning curves", "; ".join(parts), ratios=(1, 1))
    for panel, column in zip(axes, ("eval_nll", "eval_acc"), strict=True):
        panel.chance(CHANCE_LOSS if column == "eval_nll" else 0.5)
        for index, (arm, runs) in enumerate(histories.items()):
            courses: list[dict[float, float]] = []
            for history in runs:
                pairs, steps = np.nan_to_num(numbers(history, "train_pairs")).cumsum(), numbers(history, "step")
                values = numbers(history, column)
                points = zip((pairs if by_pairs else steps).tolist(), values.tolist(), np.isfinite(values), strict=True)
                courses.append({place: value for place, value, is_known in points if is_known})
            courses = [course for course in courses if course]
            common = sorted(set.intersection(*map(set, courses))) if courses else []
            mean = [(place, fmean(course[place] for course in courses)) for place in common]
            label = arm if index < _MOST_NAMED else None
            draw_seeds(panel, [list(course.items()) for course in courses], mean, index, label)
    axes[0].set_ylabel("NLL (nats a pair)")
    axes[1].set(ylabel="accuracy", xlabel="training pairs" if by_pairs else "optimizer step")
    count_ticks(axes[1].xaxis)
    draw_legend(axes[0])
    return figure


def plot_differences(comparison: RunComparison) -> Figure:
    """Differences of each arm from the baseline, with 95 % intervals.

    They are in accuracy and NLL.

    Args:
        comparison: comparison of at least two arms.
    """
    arms = [arm.name for arm in comparison.arms[1:]]
    caption = (
        f"each arm − {comparison.baseline}, 95 % intervals; n = {comparison.num_pairs:,} common validation pairs of "
        f"{comparison.num_prompts:,} prompts"
    )
    items = {(item.arm, item.score): (item.estimate, item.verdict) for item in comparison.differences}
    by_score = {
        label: {arm: (arm, *items[arm, score]) for arm in arms}
        for score, label in (("accuracy", "accuracy (right is better)"), ("nll", "NLL, nats (left is better)"))
    }
    return draw_differences("Differences to the baseline", caption, by_score)


def plot_spectra(spectra: Mapping[str, HessianSpectrum]) -> Figure:
    """Largest eigenvalues by rank, and densities if all spectra have one.

    Args:
        spectra: spectra by run, all of one matrix and one selection of parameters.
    """
    from rm_optimizer.landscape.estimates.density import density_curve
    from rm_optimizer.reporting.landscape.spectrum import matrix_title

    first = next(iter(spectra.values()))
    sizes = sorted({spectrum.num_pairs for spectrum in spectra.values()})
    shown = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}, so not quite comparable"
    title = f"{matrix_title(first)}: spectra"
    caption = f"n = {shown} pairs in each analysis; {first.params} parameters; bars: error bounds"
    has_density = all(spectrum.density is not None for spectrum in spectra.values())
    figure, axes = new_figure(title, caption, ratios=(1, 1) if has_density else (1,), shares_x=False)
    for index, (name, spectrum) in enumerate(spectra.items()):
        values = spectrum.eigenvalues[: spectrum.num_top or None]
        bounds, label = spectrum.error_bounds[: len(values)], name if index < _MOST_NAMED else None
        axes[0].curve(range(1, len(values) + 1), values, label, error=bounds, **series_line(index))
    axes[0].set(xlabel="rank from the largest", ylabel="eigenvalue")
    count_ticks(axes[0].xaxis)
    if has_density:
        for index, spectrum in enumerate(spectra.values()):
            assert spectrum.density is not None, "all spectra have a density"
            curve = density_curve(spectrum.density)
            axes[1].curve(curve.grid, curve.density, **series_line(index) | {"marker": None})
        axes[1].set(xlabel="eigenvalue", ylabel="share per unit", yscale="log")
        axes[1].set_ylim(bottom=1e-6 * axes[1].get_ylim()[1])
    draw_legend(axes[0])
    return figure
