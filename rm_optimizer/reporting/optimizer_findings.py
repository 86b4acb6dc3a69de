"""Tables and methods of a comparison of optimizers, as text."""

from __future__ import annotations

import math

from rich.console import Console

from rm_optimizer.core.metrics.effects import SCORES
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings
from rm_optimizer.reporting.tables import TextTable, output_console

_BYTES_OF_MB = 1e6


def print_findings(found: ComparisonFindings, console: Console | None = None) -> None:
    """Print the tables of a comparison, and notes on how to read them.

    Args:
        found: the findings.
        console: destination; None is standard output.
    """
    console = console or output_console()
    for table in finding_tables(found):
        console.print(table.drawn())
    for sentence in found.warnings:
        console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)


def methods(found: ComparisonFindings) -> str:
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


def finding_tables(found: ComparisonFindings) -> list[TextTable]:
    """Verdicts, tuning, costs and every seed."""
    return [_verdict_table(found), _rate_table(found), _cost_table(found), _seed_table(found)]


def _verdict_table(found: ComparisonFindings) -> TextTable:
    frozen = found.frozen
    title = f"Test scores on {frozen.sizes['test']:,} pairs of {frozen.prompts['test']:,} prompts, 95 % intervals"
    primary = {item.arm: item for item in found.verdicts if item.is_primary}
    rows = []
    for arm in found.arms:
        scores = [str(arm.scores[name]) for name in SCORES]
        item = primary.get(arm.name)
        judged = ["", "", "", ""]
        if item is not None:
            p = "n/a" if item.holm_p is None else f"{item.holm_p:.3f}"
            judged = [f"{item.difference:+.3f}", p, item.verdict, f"{item.detectable:.3f}"]
        elif arm.name == frozen.options.reference:
            judged = ["reference", "", "", ""]
        rate = "none" if arm.chosen.rate is None else f"{arm.chosen.rate:g}" + (" (edge)" if arm.chosen.at_edge else "")
        rows.append((arm.name, rate, str(len(arm.seeds)), *scores, *judged))
    header = ("arm", "lr", "seeds", "accuracy", "NLL", "Brier", "ECE", "NLL less reference", "Holm p", "verdict")
    return TextTable(title, (*header, "detectable"), tuple(rows))


def _rate_table(found: ComparisonFindings) -> TextTable:
    rows = []
    for arm in found.arms:
        points = sorted((point for point in found.rates if point.arm == arm.name), key=lambda point: point.rate)
        cells = [f"{point.rate:g}: {_known(point.nll, '.4f', 'diverged')}" for point in points]
        rows.append((arm.name, ", ".join(cells)))
    title = f"Tuning: validation NLL on {found.frozen.sizes['val']:,} pairs by learning rate"
    return TextTable(title, ("arm", "learning rate: NLL"), tuple(rows))


def _cost_table(found: ComparisonFindings) -> TextTable:
    rows = []
    for arm in found.arms:
        means, target = arm.means, arm.target
        error = _known(means["trace_standard_error"], ".0f", "n/a")
        trace = f"{means['trace']:.0f} ± {error}" if math.isfinite(means["trace"]) else "n/a"
        reached = (
            f"{_known(target.steps, '.0f', 'missed')} ({len(arm.seeds) - target.missed} of {len(arm.seeds)} seeds)"
        )
        rows.append(
            (
                arm.name,
                f"{means['step_seconds']:.2f}",
                f"{means['tokens'] / means['train_seconds']:,.0f}",
                f"{means['passes_per_step']:.0f}",
                f"{means['state_bytes'] / _BYTES_OF_MB:,.1f}",
                f"{means['peak_memory_bytes'] / _BYTES_OF_MB:,.0f}",
                f"{means['clipped_share']:.0%}",
                _known(means["top_eigenvalue"], ".1f", "n/a"),
                trace,
                reached,
                _known(target.tokens, ",.0f", "missed"),
                _known(target.seconds, ".1f", "missed"),
            )
        )
    header = ("arm", "s/step", "tokens/s", "passes", "state MB", "memory MB", "clipped", "top eigenvalue", "trace")
    title = f"Cost, curvature, and first evaluation at or below validation NLL {found.target:.4f}"
    return TextTable(title, (*header, "steps to it", "tokens to it", "seconds to it"), tuple(rows))


def _seed_table(found: ComparisonFindings) -> TextTable:
    forms = {"nll": ".4f", "accuracy": ".4f", "top_eigenvalue": ".1f"}
    rows = tuple(
        (arm.name, str(seed), *(_known(arm.per_seed[name][at], form, "n/a") for name, form in forms.items()))
        for arm in found.arms
        for at, seed in enumerate(arm.seeds)
    )
    head = ("arm", "seed", "NLL", "accuracy", "top eigenvalue")
    return TextTable("Test scores and curvature of the final runs", head, rows)


def _known(value: float, form: str, missing: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else missing
