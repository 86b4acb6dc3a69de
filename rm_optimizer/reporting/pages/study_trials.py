"""The part of a study's page about its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rm_optimizer.experiments.study import DAMAGED, StudyPlan
from rm_optimizer.reporting.pages.document import Part

TrialRows = Sequence[Mapping[str, Any]]


def trials_part(plan: StudyPlan, rows: TrialRows) -> Part:
    """Trials by state, errors of failed ones, versions and machine.

    Args:
        plan: plan of the study.
        rows: its trials, see `Study.rows`.
    """
    counts = Counter(str(row["state"]) for row in rows)
    states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    about = [
        f"{len(rows)} trials: {states}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in plan.versions.items())}.",
        f"Machine: {', '.join(f'{name} {value}' for name, value in plan.machine.items())}.",
        *([f"Commit: {plan.commit}."] if plan.commit else []),
    ]
    return Part("Trials", (*about, failure_lines(rows)))


def failure_lines(rows: TrialRows) -> tuple[str, ...]:
    """A line for each trial that failed, diverged or is damaged, with its error."""
    bad = (row for row in rows if row["state"] in ("failed", "diverged", DAMAGED))
    return tuple(f"{row['label']}: {row['state']}, {row['error'] or 'no error is recorded'}" for row in bad)
