"""One page of HTML on a readiness report: verdict, what it rests on, what to do next. It needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rm_optimizer.doctor.diagnosis import Status
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
_STYLE = """
:root{color-scheme:light dark;--ink:#1d1f23;--soft:#5b6068;--line:#dfe2e7;--paper:#fff;--card:#f6f7f9;
--good:#00704f;--fair:#8a5a00;--bad:#b3410a;--open:#4d5560;--dot:#0062a3}
@media(prefers-color-scheme:dark){:root{--ink:#e9ebee;--soft:#a4abb5;--line:#363b43;--paper:#15171b;--card:#1e2127;
--good:#4fc79c;--fair:#e9b44c;--bad:#ff9361;--open:#b3bac4;--dot:#6cb8ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.15rem;font-weight:500;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
.answer{border-left:.5rem solid var(--tone);background:var(--card);padding:1rem 1.2rem;margin:1rem 0;
border-radius:.3rem}
.answer strong{display:block;font-size:2rem;line-height:1.2;color:var(--tone)}
.answer p{margin:.4rem 0 0}
.good{--tone:var(--good)}.fair{--tone:var(--fair)}.bad{--tone:var(--bad)}.open{--tone:var(--open)}
ol,ul{margin:.3rem 0;padding-left:1.4rem}li{margin:.35rem 0}
.soft,td small,.scale{color:var(--soft)}
table{border-collapse:collapse;width:100%}
caption{text-align:left;color:var(--soft);padding-bottom:.4rem}
th,td{text-align:left;padding:.45rem .6rem .45rem 0;border-top:1px solid var(--line);vertical-align:top}
th{font-weight:500}thead th{color:var(--soft);font-size:.9rem;border-top:0}
td.number{white-space:nowrap;font-variant-numeric:tabular-nums}
small{display:block}
svg{display:block;width:100%;min-width:7rem;height:1.4rem}
.track{stroke:var(--line)}.chance{stroke:var(--soft)}.range{stroke:var(--dot)}.dot{fill:var(--dot)}
details{margin-top:1.5rem}summary{cursor:pointer;font-weight:500}
.failed{color:var(--bad)}
@media(max-width:40rem){thead{display:none}tr{display:block;border-top:1px solid var(--line);padding:.5rem 0}
th,td{display:block;border:0;padding:.1rem 0}}
@media print{main{max-width:none}details>*{display:block}}
"""


def readiness_page(report: RLReadinessReport, model: str) -> str:
    """The page as HTML, light or dark as the reader's system is.

    Args:
        report: a report of `measure_readiness`.
        model: name of the model.
    """
    use = "" if report.algorithm is None else f" for {ALGORITHM_NAMES[report.algorithm]}"
    tone, answer = _ANSWERS[report.verdict]
    rows = readiness_rows(report)
    first = [row for row in rows if row.contribution is not None or row.name.startswith("probe_")] or rows[:3]
    others = [row for row in rows if row not in first]
    parts = [
        f"<h1>Is <b>{escape(model)}</b> good enough{use}?</h1>",
        f'<div class="answer {tone}"><strong>{answer}</strong>',
        f"<p>Verdict: {report.verdict}. {_sentence(report.basis)}</p>",
        *(f'<p class="soft">{_sentence(caution)}</p>' for caution in report.cautions),
        "</div>",
        _section("What to do next", _list("ol", report.recommendations)),
        _section("What it rests on", _table(first, "95 % intervals; a gray tick marks chance") if first else ""),
        _section("All other numbers", _table(others, "Reported, and no part of the score") if others else ""),
        _gates(report),
        _section("How it was measured", _list("ul", [_sentence(line) for line in _lines(report)])),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Readiness of {escape(model)}: {report.verdict}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _lines(report: RLReadinessReport) -> list[str]:
    """Sentences on the probes and the sample."""
    return [line for line in (*probe_lines(report), sample_line(report)) if line]


def _sentence(text: str) -> str:
    """Escaped text with a capital at the start and a full stop."""
    return escape(f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _list(kind: str, sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_sentence(sentence)}</li>" for sentence in sentences)
    return f"<{kind}>{items}</{kind}>" if items else ""


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
    """Failed checks in full, and the others by name."""
    if not report.gates:
        return ""
    failed = "".join(
        f'<li class="failed">{escape(check.name)}: {escape(check.explanation)}</li>' for check in report.failed_gates
    )
    warned = "".join(
        f"<li>{escape(check.name)}: {escape(check.explanation)}</li>"
        for check in report.gates
        if check.status is Status.warn
    )
    fine = [check.name for check in report.gates if check.status is Status.ok]
    content = f"<ul>{failed}{warned}</ul>" if failed or warned else ""
    names = f'<p class="soft">{escape(", ".join(fine))}</p>'
    return _section(
        "Checks of the model",
        f"{content}<details><summary>{len(fine)} of {len(report.gates)} checks are ok</summary>{names}</details>",
    )
