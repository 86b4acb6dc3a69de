"""A diagnosis as a table in a terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rm_optimizer.doctor.diagnosis import Check, Diagnosis, Status
from rm_optimizer.reporting.tables import output_console

_STYLES = {Status.ok: "green", Status.warn: "yellow", Status.fail: "bold red", Status.skipped: "dim"}


def diagnosis_table(diagnosis: Diagnosis, *, show_all: bool = False) -> Group:
    """One row for each check that is not ok, one line for checks that passed or were skipped, and the verdict."""
    table = Table(title=Text(f"Doctor: {diagnosis.model}", "bold"), title_justify="left", header_style="bold")
    for name in ("", "check", "measured", "what it means"):
        table.add_column(Text(name), no_wrap=name == "check")
    hidden = {Status.skipped} if show_all else {Status.skipped, Status.ok}
    for check in diagnosis.checks:
        if check.status not in hidden:
            style = _STYLES[check.status]
            table.add_row(Text(check.status, style), Text(check.name), Text(_measured(check)), Text(check.explanation))
    head = [table] if table.row_count else [Text(f"Doctor: {diagnosis.model}", "bold")]
    num_ok = len(diagnosis.names(Status.ok))
    fine = [] if show_all else [Text(f"{num_ok} checks ok (--all shows them)", _STYLES[Status.ok])]
    return Group(*head, *fine, *_skipped_lines(diagnosis), *_sample_lines(diagnosis), _verdict(diagnosis))


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None, *, show_all: bool = False) -> None:
    """Print `diagnosis_table`."""
    (console or output_console()).print(diagnosis_table(diagnosis, show_all=show_all))


def _measured(check: Check) -> str:
    if check.measured is None:
        return "n/a"
    value = check.measured if isinstance(check.measured, str) else f"{check.measured:.4g}"
    return f"{value} {check.unit}".strip()


def _skipped_lines(diagnosis: Diagnosis) -> list[Text]:
    """Names of skipped checks, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        if check.status is Status.skipped:
            reasons.setdefault(check.explanation, []).append(check.name)
    return [Text(f"skipped {', '.join(names)}: {reason}", "dim") for reason, names in reasons.items()]


def _sample_lines(diagnosis: Diagnosis) -> list[Text]:
    return [
        Text(
            f"{name}: {total:,} pairs, {diagnosis.num_pairs_audited.get(name, 0):,} audited, "
            f"{diagnosis.num_pairs_scored.get(name, 0):,} scored (seed {diagnosis.seed})"
        )
        for name, total in diagnosis.num_pairs.items()
    ]


def _verdict(diagnosis: Diagnosis) -> Text:
    failed, warned = diagnosis.names(Status.fail), diagnosis.names(Status.warn)
    parts = [
        f"{len(names)} {word} ({', '.join(names)})" for word, names in (("failed", failed), ("warn", warned)) if names
    ]
    found = "; ".join(parts) or "nothing found that breaks a reward model"
    return Text(f"verdict: {diagnosis.verdict} in {diagnosis.wall_seconds:.1f} s: {found}", _STYLES[diagnosis.verdict])
