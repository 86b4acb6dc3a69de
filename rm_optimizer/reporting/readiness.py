"""A readiness report as table, picture and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.text import Text

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.reporting.document import Answer, Document, Drawing, Listing, Part, Tone
from rm_optimizer.reporting.figures import BLUE, GRAY, GREEN, VERMILION, new_figure
from rm_optimizer.reporting.html import sentence
from rm_optimizer.reporting.tables import TextTable, output_console
from rm_optimizer.rl_coupling.readiness.report import Algorithm, ReadinessVerdict, RLReadinessReport

_WORDS: Mapping[str, tuple[str, str]] = {
    "on_policy_accuracy": ("accuracy on the policy's responses", "random pairs of them, judged by the oracle"),
    "accuracy": ("accuracy on labeled pairs", "chance is 0.5"),
    "accuracy_relative": ("accuracy relative to the labels' noise", "0 is chance, 1 the best that labels allow"),
    "worst_slice_accuracy": ("accuracy on the worst slices", "20 % quantile over subsets or sources"),
    "nll": ("NLL after temperature", "chance is 0.693; lower is better"),
    "brier": ("Brier score after temperature", "chance is 0.25; lower is better"),
    "reward_spread": ("reward variance within prompts", "share of all variance; a low share slows PPO and RLOO"),
    "tied_groups": ("groups of equal rewards", "GRPO gets no gradient from them"),
    "length_correlation": ("correlation with length", "within prompts; 0 is indifferent to length"),
    "style_flips": ("preferences turned by style", "the loser is edited in style alone; 0 is best"),
    "epistemic_std": ("disagreement of the ensemble", "standard deviations of the reward within prompts"),
    "policy_out_of_distribution": ("policy's responses unlike the pairs", "0.05 if they are alike"),
    "top_eigenvalue": ("top eigenvalue of the Hessian", "sharpness; not known to predict anything here"),
    "temperature": ("temperature that calibrates", "above 1 the model is over-confident"),
}

_CHANCE = {"accuracy": 0.5, "worst_slice_accuracy": 0.5, "on_policy_accuracy": 0.5, "accuracy_relative": 0.0}
_SHARES = (*_CHANCE, "reward_spread", "tied_groups", "style_flips", "policy_out_of_distribution")
ALGORITHM_NAMES = {
    Algorithm.bon: "best-of-n sampling",
    Algorithm.rloo_kl: "RLOO with a KL penalty",
    Algorithm.ppo_kl: "PPO with a KL penalty",
    Algorithm.grpo: "GRPO",
}
_LOOKS: Mapping[ReadinessVerdict, tuple[Tone, str, str, str]] = {
    ReadinessVerdict.ready: ("good", "Yes", "bold green", GREEN),
    ReadinessVerdict.acceptable: ("fair", "Yes, if watched", "bold yellow", "#B07800"),
    ReadinessVerdict.not_recommended: ("bad", "No", "bold red", VERMILION),
    ReadinessVerdict.unknown: ("open", "Not known", "bold", GRAY),
}
"""Tone and headline of a verdict on a page, its style in a terminal, and its color in a picture."""


@dataclass(frozen=True)
class ReadinessRow:
    """One measured number.

    Args:
        name: its name in the report.
        title: its name in words.
        value: the number.
        meaning: scale, or what it is good for, in words.
        contribution: change of the score that it makes; None if it takes no part.
    """

    name: str
    title: str
    value: Estimate
    meaning: str
    contribution: float | None

    @property
    def is_share(self) -> bool:
        """True for a number between 0 and 1 that is drawn.

        The numbers of single edits are not drawn.
        """
        return self.name in _SHARES or self.name.startswith("probe_")


def readiness_rows(report: RLReadinessReport) -> list[ReadinessRow]:
    """Rows of all measured numbers.

    The score's numbers are first, then the probe's, then the others in their order.
    """
    found = {**report.features, **report.unscored}

    def place(name: str) -> tuple[bool, bool, int]:
        return (name not in report.components, not name.startswith("probe_"), order.index(name))

    order = [name for known in _WORDS for name in found if name == known or name.startswith(f"{known}_edit_")]
    order += [name for name in found if name not in order]
    rows = []
    for name in sorted(found, key=place):
        title, meaning = _WORDS.get(name, (name.replace("_", " "), ""))
        if name.startswith("probe_"):
            title = f"model's pick of {name.removeprefix('probe_')} preferred"
            meaning = "by the oracle, against another response; chance is 0.5"
        elif name.startswith("style_flips_edit_"):
            title = f"… by the edit {name.removeprefix('style_flips_edit_')}"
        rows.append(ReadinessRow(name, title, found[name], meaning, report.components.get(name)))
    return rows


def _measured_lines(report: RLReadinessReport) -> list[str]:
    """Question of each probe and the reason why it stopped.

    Then the data behind the measurement.
    """
    lines = [
        f"probe of {probe.n}: {probe.num_questions:,} of at most {probe.max_questions:,} questions, "
        f"{probe.num_labels:,} answers{f', {probe.num_open:,} left open' if probe.num_open else ''}; "
        f"stopped because {probe.stopped}"
        for probe in report.probes
    ]
    if (sample := report.sample) is not None:
        responses = f", {sample.num_prompts:,} prompts with {sample.num_responses:,} responses each"
        lines.append(
            f"{sample.num_pairs:,} labeled pairs{responses if sample.num_prompts else ''}, "
            f"{sample.num_labels:,} comparisons by the oracle, seed {sample.seed}, {sample.wall_seconds:.0f} s"
        )
    return lines


def _table(title: str, rows: Sequence[ReadinessRow]) -> TextTable:
    head = ("measured", "value", "in the score", "scale")
    shares = ("" if row.contribution is None else f"{row.contribution:+.2f}" for row in rows)
    cells = ((row.title, row.value, share, row.meaning) for row, share in zip(rows, shares, strict=True))
    return TextTable(title, head, tuple(cells))


def print_readiness(report: RLReadinessReport, title: str, console: Console | None = None) -> None:
    """Print the numbers, failed gates and the verdict.

    Its reason, next steps, and the limits of the verdict follow.
    """
    num_ok = sum(check.status is Status.ok for check in report.gates)
    gates = [Text(f"gates: {num_ok} of {len(report.gates)} checks ok")] if report.gates else []
    if warned := [check.name for check in report.gates if check.status is Status.warn]:
        gates.append(Text(f"gates that warn: {', '.join(warned)} (rm-opt doctor explains them)", "yellow"))
    gates += [Text(f"gate {check.name} failed: {check.explanation}", "red") for check in report.failed_gates]
    table = _table(title, readiness_rows(report)).drawn()
    table.columns[-1].justify = "left"  # words, which may begin with a number
    (console or output_console()).print(
        Group(
            *([table] if report.features else []),
            *(Text(line, "dim") for line in _measured_lines(report)),
            *gates,
            Text(f"verdict: {report.verdict}", _LOOKS[report.verdict][2]),
            Text(report.basis),
            *(Text(f"next: {sentence}") for sentence in report.recommendations),
            *(Text(f"note: {sentence}", "dim") for sentence in report.cautions),
        )
    )


def plot_readiness(report: RLReadinessReport) -> Figure:
    """The measured shares with their intervals and chance levels.

    The verdict is the title.

    Args:
        report: a report of `measure_readiness`.
    """
    rows = [row for row in readiness_rows(report) if row.is_share]
    of = "" if report.algorithm is None else f" for {report.algorithm}"
    caption = "95% intervals, gray ticks: chance, filled: in the score"
    height = 1.6 + 0.34 * max(len(rows), 3)
    figure, (axes,) = new_figure(f"Readiness{of}: {report.verdict}", caption, height=height)
    for place, row in enumerate(reversed(rows)):
        found, is_scored = row.value, row.contribution is not None
        low, high = (None if end is None else min(max(end, 0.0), 1.0) for end in (found.low, found.high))
        shown = replace(found, value=min(max(found.value, 0.0), 1.0), low=low, high=high)
        if (chance := 0.5 if row.name.startswith("probe_") else _CHANCE.get(row.name)) is not None:
            axes.plot([chance] * 2, [place - 0.3, place + 0.3], color=GRAY, linewidth=1.5)
        color = _LOOKS[report.verdict][3] if is_scored else BLUE
        axes.named(place, row.title, shown, color=color, markerfacecolor=color if is_scored else "white", markersize=7)
    axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(False, axis="y")
    return figure


def readiness_page(report: RLReadinessReport, model: str) -> str:
    """The page as HTML, in one file.

    Args:
        report: a report of `measure_readiness`.
        model: name of the model.
    """
    use = "" if report.algorithm is None else f" for {ALGORITHM_NAMES[report.algorithm]}"
    tone, headline, *_ = _LOOKS[report.verdict]
    rows = readiness_rows(report)
    first = [row for row in rows if row.contribution is not None or row.name.startswith("probe_")] or rows[:3]
    others = [row for row in rows if row not in first]
    shares = "Each share with its 95 % interval; gray ticks mark chance"
    picture = [Drawing("readiness", plot_readiness(report), shares)] if any(row.is_share for row in rows) else []
    by_status = {status: [check for check in report.gates if check.status is status] for status in Status}
    bad = (*by_status[Status.fail], *by_status[Status.warn])
    fine = ", ".join(check.name for check in by_status[Status.ok])
    gates = f"{len(by_status[Status.ok])} of {len(report.gates)} checks are ok: {fine}" if report.gates else ""
    parts = (
        Part("What to do next", (tuple(map(sentence, report.recommendations)),)),
        Part("What it rests on", (*picture, Listing("measured", _table("95 % intervals", first)))),
        Part("All other numbers", (Listing("others", _table("Reported, and no part of the score", others)),)),
        Part("Checks of the model", (tuple(f"{each.status}, {each.name}: {each.explanation}" for each in bad), gates)),
        Part("How it was measured", (tuple(map(sentence, _measured_lines(report))),)),
    )
    answer = Answer(tone, headline, (f"Verdict: {report.verdict}. {sentence(report.basis)}", *report.cautions))
    return Document(f"Is {model} good enough{use}?", answer, parts).html()
