"""A readiness report in a terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.text import Text

from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.reporting.readiness.rows import probe_lines, readiness_rows, sample_line
from rm_optimizer.reporting.tables import cell_text, new_table, output_console
from rm_optimizer.rl_coupling.readiness.report import ReadinessVerdict, RLReadinessReport

_STYLES = {
    ReadinessVerdict.ready: "bold green",
    ReadinessVerdict.acceptable: "bold yellow",
    ReadinessVerdict.not_recommended: "bold red",
    ReadinessVerdict.unknown: "bold",
}


def readiness_table(report: RLReadinessReport, title: str) -> Group:
    """Verdict and its reason, the numbers, failed gates, next steps, and the limits of the verdict."""
    table = new_table(title, "measured", "value", "scale", "in the score")
    for column in (table.columns[1], table.columns[2]):
        column.justify = "left"
    for row in readiness_rows(report):
        share = "" if row.contribution is None else f"{row.contribution:+.2f}"
        table.add_row(Text(row.title), cell_text(row.value), Text(row.meaning, "dim"), Text(share))
    num_ok = sum(check.status is Status.ok for check in report.gates)
    gates = [Text(f"gates: {num_ok} of {len(report.gates)} checks ok")] if report.gates else []
    if warned := [check.name for check in report.gates if check.status is Status.warn]:
        gates.append(Text(f"gates that warn: {', '.join(warned)} (rm-opt doctor explains them)", "yellow"))
    gates += [Text(f"gate {check.name} failed: {check.explanation}", "red") for check in report.failed_gates]
    lines = [*probe_lines(report), sample_line(report)]
    return Group(
        *([table] if report.features else []),
        *(Text(line, "dim") for line in lines if line),
        *gates,
        Text(f"verdict: {report.verdict}", _STYLES[report.verdict]),
        Text(report.basis),
        *(Text(f"next: {sentence}") for sentence in report.recommendations),
        *(Text(f"note: {sentence}", "dim") for sentence in report.cautions),
    )


def print_readiness(report: RLReadinessReport, title: str, console: Console | None = None) -> None:
    """Print `readiness_table`."""
    (console or output_console()).print(readiness_table(report, title))
