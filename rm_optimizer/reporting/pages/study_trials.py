"""The section of a study's page on its trials."""

from __future__ import annotations

from collections import Counter

from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.reporting.pages.html import bullets, paragraph, section


def trials_section(study: Study) -> str:
    """Trials by state, errors of failed ones, versions and machine."""
    rows = list(study.rows())
    counts = Counter(str(row["state"]) for row in rows)
    states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    plan = study.plan
    about = [
        f"{len(rows)} trials: {states}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in plan.versions.items())}.",
        f"Machine: {', '.join(f'{name} {value}' for name, value in plan.machine.items())}.",
        *([f"Commit: {plan.commit}."] if plan.commit else []),
    ]
    return section("Trials", *(paragraph(line) for line in about), bullets(failure_lines(study)))


def failure_lines(study: Study) -> list[str]:
    """A line for each trial that failed or diverged, with its error."""
    rows = [row for row in study.rows() if row["state"] in ("failed", "diverged")]
    return [f"{row['label']}: {row['state']}, {row['error'] or 'no error is recorded'}" for row in rows]
