"""Self-contained HTML page about a readiness report: verdict, evidence and next steps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.reporting.pages.html import answer, bullets, details, page, paragraph, section, sentence
from rm_optimizer.reporting.readiness.rows import (
    ReadinessRow,
    chance_of,
    is_share,
    probe_lines,
    readiness_rows,
    sample_line,
)
from rm_optimizer.rl_coupling.readiness.report import Algorithm, ReadinessVerdict, RLReadinessReport

ALGORITHM_NAMES = {
    Algorithm.bon: "best-of-n sampling",
    Algorithm.rloo_kl: "RLOO with a KL penalty",
    Algorithm.ppo_kl: "PPO with a KL penalty",
    Algorithm.grpo: "GRPO",
}
_ANSWERS = {
    ReadinessVerdict.ready: ("good", "Yes"),
    ReadinessVerdict.acceptable: ("fair", "Yes, if watched"),
    ReadinessVerdict.not_recommended: ("bad", "No"),
    ReadinessVerdict.unknown: ("open", "Not known"),
}
_BARS = """
main{max-width:60rem}
small{display:block}td small,.scale{color:var(--soft)}
td.number{white-space:nowrap}
svg{display:block;width:100%;min-width:7rem;height:1.4rem}
.track{stroke:var(--line)}.chance{stroke:var(--soft)}.range{stroke:var(--link)}.dot{fill:var(--link)}
@media(max-width:40rem){table{min-width:0;width:100%}thead{display:none}
tr{display:block;border-top:1px solid var(--line);padding:.5rem 0}th,td{display:block;border:0;padding:.1rem 0}}
"""


def readiness_page(report: RLReadinessReport, model: str) -> str:
    """The page as HTML, light or dark like the reader's system.

    Args:
        report: a report of `measure_readiness`.
        model: name of the model.
    """
    use = "" if report.algorithm is None else f" for {ALGORITHM_NAMES[report.algorithm]}"
    tone, headline = _ANSWERS[report.verdict]
    rows = readiness_rows(report)
    first = [row for row in rows if row.contribution is not None or row.name.startswith("probe_")] or rows[:3]
    others = [row for row in rows if row not in first]
    parts = [
        answer(tone, headline, f"Verdict: {report.verdict}. {sentence(report.basis)}", *report.cautions),
        section("What to do next", bullets(map(sentence, report.recommendations))),
        section("What it rests on", _table(first, "95 % intervals; a gray tick marks chance") if first else ""),
        section("All other numbers", _table(others, "Reported, and no part of the score") if others else ""),
        section("Checks of the model", _gates(report)),
        section("How it was measured", bullets(map(sentence, _lines(report)))),
    ]
    return page(f"Is {model} good enough{use}?", parts, style=_BARS)


def _lines(report: RLReadinessReport) -> list[str]:
    """Sentences on the probes and the sample."""
    return [line for line in (*probe_lines(report), sample_line(report)) if line]


def _table(rows: Sequence[ReadinessRow], caption: str) -> str:
    body = "".join(_row(row) for row in rows)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Measured", "Value", "From 0 to 1"))
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: ReadinessRow) -> str:
    share = "" if row.contribution is None else f"<small>{row.contribution:+.2f} in the score</small>"
    bar = _bar(row) if is_share(row.name) else ""
    return (
        f'<tr><th scope="row">{escape(row.title)}<small class="scale">{escape(row.meaning)}</small></th>'
        f'<td class="number">{escape(str(row.value))}{share}</td><td>{bar}</td></tr>'
    )


def _bar(row: ReadinessRow) -> str:
    """The value as a dot on a line from 0 to 1, its interval, and chance."""

    def at(value: float) -> str:
        return f"{2 + 96 * min(max(value, 0.0), 1.0):.2f}%"

    value, chance = row.value, chance_of(row.name)
    marks = ['<line class="track" x1="2%" x2="98%" y1="50%" y2="50%" stroke-width="2"/>']
    if chance is not None:
        marks.append(f'<line class="chance" x1="{at(chance)}" x2="{at(chance)}" y1="15%" y2="85%" stroke-width="2"/>')
    if value.low is not None and value.high is not None:
        marks.append(
            f'<line class="range" x1="{at(value.low)}" x2="{at(value.high)}" y1="50%" y2="50%" stroke-width="4"/>'
        )
    marks.append(f'<circle class="dot" cx="{at(value.value)}" cy="50%" r="6"/>')
    return f'<svg role="img" aria-label="{escape(row.title)}: {escape(str(row.value))}">{"".join(marks)}</svg>'


def _gates(report: RLReadinessReport) -> str:
    """Failed checks and warnings in full, and the others by name."""
    if not report.gates:
        return ""
    warned = [check for check in report.gates if check.status is Status.warn]
    found = bullets(
        f"{check.status.value}, {check.name}: {check.explanation}" for check in (*report.failed_gates, *warned)
    )
    fine = [check.name for check in report.gates if check.status is Status.ok]
    return found + details(f"{len(fine)} of {len(report.gates)} checks are ok", paragraph(", ".join(fine)))
