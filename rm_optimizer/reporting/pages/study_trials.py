"""Common parts of studies' pages: the stored result, and the trials."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.study.driver import DAMAGED
from rm_optimizer.experiments.study.plan import StudyPlan
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.reporting.pages.document import Part

TrialRows = Sequence[Mapping[str, Any]]
RecordT = TypeVar("RecordT", bound=JsonRecord)


def stored_record(path: Path, kind: type[RecordT], command: str) -> RecordT | None:
    """A result of a study; None if it does not exist yet.

    Args:
        path: its file.
        kind: its type.
        command: command that writes it.

    Raises:
        ConfigError: if the result is damaged.
    """
    values = _values(path, command)
    return None if values is None else _as(kind, values, path, command)


def _values(path: Path, command: str) -> Any:
    """The JSON of a file; None if there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, command) from error


def _as(kind: type[RecordT], values: Any, path: Path, command: str) -> RecordT:
    try:
        return from_values(kind, values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, command) from error


def _damaged(path: Path, command: str) -> ConfigError:
    return ConfigError(f"{path} is damaged; {command} writes it again")


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
