"""A diagnosis as a table in a terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rm_optimizer.doctor.diagnosis import Diagnosis, Status
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
            value = check.measured
            found = "n/a" if value is None else value if isinstance(value, str) else f"{value:.4g}"
            measured = "n/a" if value is None else f"{found} {check.unit}".strip()
            status = Text(check.status, _STYLES[check.status])
            table.add_row(status, Text(check.name), Text(measured), Text(check.explanation))
    head = [table] if table.row_count else [Text(f"Doctor: {diagnosis.model}", "bold")]
    num_ok = len(diagnosis.names(Status.ok))
    fine = [] if show_all else [Text(f"{num_ok} checks ok (--all shows them)", _STYLES[Status.ok])]
    reasons: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        if check.status is Status.skipped:
            reasons.setdefault(check.explanation, []).append(check.name)
    skipped = [Text(f"skipped {', '.join(names)}: {reason}", "dim") for reason, names in reasons.items()]
    audited, scored = diagnosis.num_pairs_audited, diagnosis.num_pairs_scored
    samples = [
        Text(
            f"{name}: {total:,} pairs, {audited.get(name, 0):,} audited, {scored.get(name, 0):,} scored "
            f"(seed {diagnosis.seed})"
        )
        for name, total in diagnosis.num_pairs.items()
    ]
    bad = {"failed": diagnosis.names(Status.fail), "warn": diagnosis.names(Status.warn)}
    parts = [f"{len(names)} {word} ({', '.join(names)})" for word, names in bad.items() if names]
    said = "; ".join(parts) or "nothing found that breaks a reward model"
    verdict = f"verdict: {diagnosis.verdict} in {diagnosis.wall_seconds:.1f} s: {said}"
    return Group(*head, *fine, *skipped, *samples, Text(verdict, _STYLES[diagnosis.verdict]))


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None, *, show_all: bool = False) -> None:
    """Print `diagnosis_table`."""
    (console or output_console()).print(diagnosis_table(diagnosis, show_all=show_all))
