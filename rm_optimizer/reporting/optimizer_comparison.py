"""Tables, pictures and page of a comparison of optimizers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.core.metrics.calibration import ReliabilityBin
from rm_optimizer.experiments.optimizer_comparison import findings
from rm_optimizer.experiments.optimizer_comparison.setting import Budget, Frozen
from rm_optimizer.experiments.study import DAMAGED, Study
from rm_optimizer.reporting.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.figures import (
    GRAY,
    SERIES,
    count_ticks,
    draw_differences,
    draw_legend,
    draw_seeds,
    new_figure,
    series_line,
)
from rm_optimizer.reporting.run_report import CHANCE_LOSS
from rm_optimizer.reporting.tables import SCORE_NAMES, Cell, TextTable, print_tables

TrialRows = Sequence[Mapping[str, Any]]
_BYTES_OF_MB = 1e6
_LEAST_IN_BIN = 10
"""Least number of pairs in a bin for its frequency to be drawn."""
_NO_CAUSE = (
    "Curvature is shown with the scores and explains none of them: runs that differ in sharpness differ in much else."
)


def comparison_document(folder: Path) -> Document:
    """The page of a comparison of optimizers.

    It has only the trials until every optimizer has a finished final run.

    Args:
        folder: folder of the comparison.

    Raises:
        ConfigError: if the folder holds no comparison, or one that has not started.
    """
    study = Study(folder)
    rows = list(study.rows())
    try:
        found = findings.findings(folder)
    except findings.NotFinished as error:
        title = f"Comparison of {', '.join(Frozen.of(folder).options.optimizers)}"
        plan, counts = study.plan, Counter(str(row["state"]) for row in rows)
        about = [
            f"{len(rows)} trials: {', '.join(f'{number} {state}' for state, number in sorted(counts.items()))}.",
            f"Versions: {', '.join(f'{name} {version}' for name, version in plan.versions.items())}.",
            f"Machine: {', '.join(f'{name} {value}' for name, value in plan.machine.items())}.",
            *([f"Commit: {plan.commit}."] if plan.commit else []),
        ]
        trials = Part("Trials", (*about, _failure_lines(rows)))
        return Document(title, Answer("open", "No result yet", (str(error),)), [trials])
    return findings_document(found, rows)


def findings_document(found: findings.ComparisonFindings, rows: TrialRows) -> Document:
    """The page of a comparison's findings and trials (`Study.rows`)."""
    tables = {name: Listing(name, table) for name, table in finding_tables(found).items()}
    reference = found.frozen.options.reference
    primary = [item for item in found.verdicts if item.is_primary]
    decided = [item for item in primary if item.verdict in ("better", "worse")]
    if not primary:
        few = () if found.frozen.options.budget == Budget.smoke else ("fewer than two common seeds have finished",)
        answer = Answer("bad", "No verdict", (*few, *found.warnings))
    elif not decided:
        said = f"none of the {len(primary)} optimizers is shown to be better or worse than {reference} in test NLL"
        answer = Answer("bad" if found.warnings else "fair", "Weak evidence", (said, *found.warnings))
    else:
        lines = (
            f"in test NLL, {each.arm} is {each.verdict} than {reference}: {each.difference:+.3f}" for each in decided
        )
        headline = f"{len(decided)} of {len(primary)} differ from {reference}"
        answer = Answer("fair" if found.warnings else "good", headline, (*lines, *found.warnings))
    rates = Drawing("rates", plot_rate_sensitivity(found), "Validation NLL by learning rate, a line for each optimizer")
    curves = Drawing("curves", plot_curves(found), "Validation NLL by step and by seconds")
    reliability = Drawing("reliability", plot_reliabilities(found), "How often the model is right, by how sure it is")
    judged, sharp = [], []
    if found.verdicts:
        caption = f"Differences to {reference} in test NLL and accuracy, with intervals"
        judged = [Drawing("differences", plot_arm_differences(found), caption)]
    if any(math.isfinite(value) for arm in found.arms for value in arm.per_seed["top_eigenvalue"]):
        caption = "Test accuracy by top eigenvalue, a point for each run"
        sharp = [Drawing("sharpness", plot_sharpness(found), caption)]
    parts = [
        Part("Verdicts", (tables["verdicts"], *judged)),
        Part("Sensitivity to the learning rate", (tables["tuning"], rates)),
        Part("Reliability", (reliability,)),
        Part("Cost and curvature", (tables["cost"], _NO_CAUSE, *sharp)),
        Part("Learning curves", (curves,)),
        Part("Every seed", (tables["seeds"],)),
        Part("Failed and diverged runs", (_failure_lines(rows) or "None.",)),
        Part("Methods", (methods(found).replace("`", ""),)),
    ]
    return Document(f"Comparison of {', '.join(arm.name for arm in found.arms)}", answer, parts)


def _failure_lines(rows: TrialRows) -> tuple[str, ...]:
    """A line for each trial that failed, diverged or is damaged, with its error."""
    bad = (row for row in rows if row["state"] in ("failed", "diverged", DAMAGED))
    return tuple(f"{row['label']}: {row['state']}, {row['error'] or 'no error is recorded'}" for row in bad)


def print_findings(found: findings.ComparisonFindings, console: Console | None = None) -> None:
    """Print the tables of a comparison, and notes on how to read them."""
    print_tables(finding_tables(found).values(), found.warnings, console)


def methods(found: findings.ComparisonFindings) -> str:
    """The paragraph about methods, from the plan."""
    frozen, options = found.frozen, found.frozen.options
    parts = found.versions
    tried = f"{options.rates} learning rates a half decade apart, {options.tuning_seeds} tuning seed(s) each"
    return (
        f"{frozen.sizes['train']:,} training pairs, {frozen.steps:,} steps, last weights. "
        f"Each optimizer was tuned on {tried}, by the NLL on {frozen.sizes['val']:,} validation pairs; a rate at the "
        f"edge was extended. Then {options.seeds} fresh seeds of each ran with equal first weights and equal order of "
        f"the pairs, judged on {frozen.sizes['test']:,} test pairs of {frozen.prompts['test']:,} prompts that neither "
        f"training nor tuning saw. Primary metric: test NLL against {options.reference}, Holm over the challengers. "
        f"Options: `{' '.join(options.overrides)}`. Setting {frozen.digest}; {found.machine['processor']}, torch "
        f"{parts.get('torch')}, transformers {parts.get('transformers')}, commit {found.commit}."
    )


def finding_tables(found: findings.ComparisonFindings) -> dict[str, TextTable]:
    """Verdicts, tuning, costs and every seed, by name."""
    sizes, prompts, reference = found.frozen.sizes, found.frozen.prompts, found.frozen.options.reference
    primary = {item.arm: item for item in found.verdicts if item.is_primary}
    titles = {
        "verdicts": f"Test scores on {sizes['test']:,} pairs of {prompts['test']:,} prompts, 95 % intervals",
        "tuning": f"Tuning: validation NLL on {sizes['val']:,} pairs by learning rate",
        "cost": f"Cost, curvature, and first evaluation at or below validation NLL {found.target:.4f}",
        "seeds": "Test scores and curvature of the final runs",
    }
    rows: dict[str, list[dict[str, Cell]]] = {name: [] for name in titles}
    for arm in found.arms:
        means, target, num_seeds = arm.means, arm.target, len(arm.seeds)
        judged = dict.fromkeys(("NLL − reference", "Holm p", "verdict", "detectable"), "")
        if (item := primary.get(arm.name)) is not None:
            p = "n/a" if item.holm_p is None else f"{item.holm_p:.3f}"
            values = (f"{item.difference:+.3f}", p, item.verdict, f"{item.detectable:.3f}")
            judged = dict(zip(judged, values, strict=True))
        elif arm.name == reference:
            judged["NLL − reference"] = "reference"
        rate = "none" if arm.chosen.rate is None else f"{arm.chosen.rate:g}" + (" (edge)" if arm.chosen.at_edge else "")
        scores = {label: str(arm.scores[name]) for name, label in SCORE_NAMES.items()}
        rows["verdicts"].append({"arm": arm.name, "lr": rate, "seeds": str(num_seeds), **scores, **judged})
        tuned = (f"{point.rate:g}: {_known(point.nll, '.4f', 'diverged')}" for point in _tuned(found, arm))
        rows["tuning"].append({"arm": arm.name, "learning rate: NLL": ", ".join(tuned)})
        error = _known(means["trace_standard_error"], ".0f", "n/a")
        reached = f"({num_seeds - target.missed} of {num_seeds} seeds)"
        rows["cost"].append(
            {
                "arm": arm.name,
                "s/step": f"{means['step_seconds']:.2f}",
                "tokens/s": f"{means['tokens'] / means['train_seconds']:,.0f}",
                "passes": f"{means['passes_per_step']:.0f}",
                "state MB": f"{means['state_bytes'] / _BYTES_OF_MB:,.1f}",
                "memory MB": f"{means['peak_memory_bytes'] / _BYTES_OF_MB:,.0f}",
                "clipped": f"{means['clipped_share']:.0%}",
                "top eigenvalue": _known(means["top_eigenvalue"], ".1f", "n/a"),
                "trace": f"{means['trace']:.0f} ± {error}" if math.isfinite(means["trace"]) else "n/a",
                "steps to it": f"{_known(target.steps, '.0f', 'missed')} {reached}",
                "tokens to it": _known(target.tokens, ",.0f", "missed"),
                "seconds to it": _known(target.seconds, ".1f", "missed"),
            }
        )
        forms = {"nll": ("NLL", ".4f"), "accuracy": ("accuracy", ".4f"), "top_eigenvalue": ("top eigenvalue", ".1f")}
        for at, seed in enumerate(arm.seeds):
            cells = {label: _known(arm.per_seed[name][at], form, "n/a") for name, (label, form) in forms.items()}
            rows["seeds"].append({"arm": arm.name, "seed": str(seed), **cells})
    return {name: TextTable.of(title, rows[name]) for name, title in titles.items()}


def _tuned(found: findings.ComparisonFindings, arm: findings.ArmFinding) -> list[findings.RatePoint]:
    """Tuning runs of an optimizer, by rate."""
    return sorted((point for point in found.rates if point.arm == arm.name), key=lambda point: point.rate)


def _known(value: float, form: str, missing: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else missing


def plot_rate_sensitivity(found: findings.ComparisonFindings) -> Figure:
    """Validation NLL of the last weights against the learning rate.

    There is a line for each optimizer.

    Args:
        found: findings of the comparison.
    """
    options = found.frozen.options
    count = found.frozen.sizes["val"]
    caption = f"n = {count:,} validation pairs; {options.tuning_seeds} tuning seed(s) a rate; ring: chosen"
    figure, (axes,) = new_figure("Learning-rate sensitivity", caption)
    axes.chance(CHANCE_LOSS)
    for index, arm in enumerate(found.arms):
        points = _tuned(found, arm)
        rates = sorted({point.rate for point in points})
        means = [float(np.mean([point.nll for point in points if point.rate == rate])) for rate in rates]
        axes.curve(rates, means, arm.name, **series_line(index))
        own: dict[str, Any] = {"color": SERIES[index % len(SERIES)], "linestyle": "none"}
        axes.curve([point.rate for point in points], [point.nll for point in points], marker=".", alpha=0.4, **own)
        if arm.chosen.rate is not None:
            ring: dict[str, Any] = {"marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 1.8}
            axes.curve(arm.chosen.rate, means[rates.index(arm.chosen.rate)], **own, **ring)
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation NLL (nats a pair)")
    draw_legend(axes)
    return figure


def plot_arm_differences(found: findings.ComparisonFindings) -> Figure:
    """Differences from the reference in test NLL and accuracy, with 95 % intervals.

    Args:
        found: findings with verdicts.
    """
    frozen = found.frozen
    arms = [arm.name for arm in found.arms if arm.name != frozen.options.reference]
    fewest, most = (choose(len(arm.seeds) for arm in found.arms) for choose in (min, max))
    num_seeds = str(most) if fewest == most else f"{fewest} to {most}"
    caption = (
        f"each optimizer − {frozen.options.reference}, 95 % intervals over seeds and prompts; "
        f"{num_seeds} seeds; n = {frozen.sizes['test']:,} test pairs of {frozen.prompts['test']:,} prompts"
    )
    items = {(item.arm, str(item.score)): item for item in found.verdicts}
    by_score = {
        label: {
            arm: (f"{arm}: {item.verdict}", item.difference, item.verdict)
            for arm in arms
            if (item := items[arm, score])
        }
        for score, label in (("nll", "NLL, nats (left is better)"), ("accuracy", "accuracy (right is better)"))
    }
    return draw_differences("Differences to the reference", caption, by_score)


def plot_reliabilities(found: findings.ComparisonFindings) -> Figure:
    """Frequency by confidence on the test pairs, for each optimizer.

    Each seed has a line, and all seeds of an optimizer together have one.

    Args:
        found: findings of the comparison.
    """
    count = found.frozen.sizes["test"]
    caption = (
        f"n = {count:,} test pairs a run; pale: each seed; strong: all seeds of an optimizer together, "
        f"bins of at least {_LEAST_IN_BIN} pairs"
    )
    figure, (axes,) = new_figure("Reliability", caption)
    axes.curve([0.5, 1.0], [0.5, 1.0], "perfectly calibrated", color=GRAY, linestyle=(0, (2, 2)), linewidth=1.2)
    for index, arm in enumerate(found.arms):
        seeds = [[(item.mean_confidence, item.frequency) for item in bins] for bins in arm.reliability]
        bins: dict[float, list[ReliabilityBin]] = {}
        for item in sorted((item for seed in arm.reliability for item in seed), key=lambda item: item.low):
            bins.setdefault(item.low, []).append(item)
        joined = [
            np.average([(item.mean_confidence, item.frequency) for item in items], axis=0, weights=pairs)
            for items in bins.values()
            if sum(pairs := [item.num_pairs for item in items]) >= _LEAST_IN_BIN
        ]
        draw_seeds(axes, seeds, np.array(joined), index, arm.name)
    axes.set(
        xlim=(0.495, 1.005), xlabel="probability of the preferred side", ylabel="how often that side was the better one"
    )
    draw_legend(axes, "lower right")
    return figure


def plot_sharpness(found: findings.ComparisonFindings) -> Figure:
    """Test accuracy by the top eigenvalue of the Hessian.

    There is a point for each final run with measured curvature.

    Args:
        found: findings of the comparison.
    """
    caption = "a point for each final run; runs that differ in sharpness differ in much else: no cause is shown"
    figure, (axes,) = new_figure("Sharpness and accuracy", caption)
    for index, arm in enumerate(found.arms):
        measured = [
            (sharpness, accuracy)
            for sharpness, accuracy in zip(arm.per_seed["top_eigenvalue"], arm.per_seed["accuracy"], strict=True)
            if math.isfinite(sharpness) and sharpness > 0
        ]
        if measured:
            x, y, color = [each[0] for each in measured], [each[1] for each in measured], SERIES[index % len(SERIES)]
            axes.curve(x, y, arm.name, color=color, marker="o", markersize=5, linestyle="none")
    axes.set(xscale="log", xlabel="top eigenvalue of the Hessian", ylabel="test accuracy")
    draw_legend(axes)
    return figure


def plot_curves(found: findings.ComparisonFindings) -> Figure:
    """Validation NLL of the final runs over steps and over seconds, with the target.

    Args:
        found: findings of the comparison.
    """
    caption = "pale: each seed; strong: mean over seeds; dashed: target"
    figure, panels = new_figure("Learning curves of the final runs", caption, ratios=(1, 1), shares_x=False)
    for axes, name, label in zip(panels, ("step", "seconds"), ("optimizer step", "seconds in steps"), strict=True):
        if math.isfinite(found.target):
            axes.guide("target", y=found.target, linestyle=(0, (2, 2)), linewidth=1.2)
        for index, arm in enumerate(found.arms):
            courses = [[(getattr(at, name), at.nll) for at in curve.points] for curve in arm.curves if curve.points]
            shortest = min(map(len, courses), default=0)
            mean = np.mean([course[:shortest] for course in courses], axis=0) if shortest else []
            draw_seeds(axes, courses, mean, index, arm.name)
        axes.set(xlabel=label, ylabel="validation NLL")
    count_ticks(panels[0].xaxis)
    draw_legend(panels[0])
    return figure
