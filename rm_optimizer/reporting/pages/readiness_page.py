"""Page about a readiness report: verdict, evidence and next steps."""

from __future__ import annotations

from collections.abc import Sequence

from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.reporting.pages.document import Answer, Document, Drawing, Listing, Part, Tone
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import sentence
from rm_optimizer.reporting.readiness.plot import plot_readiness
from rm_optimizer.reporting.readiness.rows import ReadinessRow, is_share, probe_lines, readiness_rows, sample_line
from rm_optimizer.reporting.tables import TextTable
from rm_optimizer.rl_coupling.readiness.report import Algorithm, ReadinessVerdict, RLReadinessReport

ALGORITHM_NAMES = {
    Algorithm.bon: "best-of-n sampling",
    Algorithm.rloo_kl: "RLOO with a KL penalty",
    Algorithm.ppo_kl: "PPO with a KL penalty",
    Algorithm.grpo: "GRPO",
}
_ANSWERS: dict[ReadinessVerdict, tuple[Tone, str]] = {
    ReadinessVerdict.ready: ("good", "Yes"),
    ReadinessVerdict.acceptable: ("fair", "Yes, if watched"),
    ReadinessVerdict.not_recommended: ("bad", "No"),
    ReadinessVerdict.unknown: ("open", "Not known"),
}


def readiness_page(report: RLReadinessReport, model: str) -> str:
    """The page as HTML, in one file.

    Args:
        report: a report of `measure_readiness`.
        model: name of the model.
    """
    use = "" if report.algorithm is None else f" for {ALGORITHM_NAMES[report.algorithm]}"
    tone, headline = _ANSWERS[report.verdict]
    rows = readiness_rows(report)
    first = [row for row in rows if row.contribution is not None or row.name.startswith("probe_")] or rows[:3]
    others = [row for row in rows if row not in first]
    shares = "Each share with its 95 % interval; gray ticks mark chance"
    picture = [Drawing("readiness", plot_readiness(report), shares)] if any(is_share(row.name) for row in rows) else []
    by_status = {status: [check for check in report.gates if check.status is status] for status in Status}
    bad = (*by_status[Status.fail], *by_status[Status.warn])
    fine = ", ".join(check.name for check in by_status[Status.ok])
    gates = f"{len(by_status[Status.ok])} of {len(report.gates)} checks are ok: {fine}" if report.gates else ""
    measured = (*probe_lines(report), sample_line(report))
    parts = (
        Part("What to do next", (tuple(map(sentence, report.recommendations)),)),
        Part("What it rests on", (*picture, _listing("measured", first, "95 % intervals"))),
        Part("All other numbers", (_listing("others", others, "Reported, and no part of the score"),)),
        Part("Checks of the model", (tuple(f"{each.status}, {each.name}: {each.explanation}" for each in bad), gates)),
        Part("How it was measured", (tuple(sentence(line) for line in measured if line),)),
    )
    answer = Answer(tone, headline, (f"Verdict: {report.verdict}. {sentence(report.basis)}", *report.cautions))
    return Document(f"Is {model} good enough{use}?", answer, parts).html(Exhibits())


def _listing(name: str, rows: Sequence[ReadinessRow], title: str) -> Listing:
    cells = tuple(
        (row.title, str(row.value), "" if row.contribution is None else f"{row.contribution:+.2f}", row.meaning)
        for row in rows
    )
    return Listing(name, TextTable(title, ("measured", "value", "in the score", "scale"), cells))
