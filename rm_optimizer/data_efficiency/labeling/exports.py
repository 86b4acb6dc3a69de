"""Answers in the exports of annotation tools: Argilla's flat records and Label Studio's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rm_optimizer.errors import DataError

_ARGILLA = ("label.responses", "preference.responses")
_JSON_MIN = ("annotation_id", "annotator")
"""Columns of Label Studio's JSON-MIN; its column of answers has a name that only the project determines."""


def exported_answers(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Answers of an exported row as given, or `skip`; None if no tool has added answers.

    Args:
        row: cells of the row.
        where: position of the row, for error messages.

    Raises:
        DataError: if the format of the export cannot be read.
    """
    if isinstance(row.get("data"), Mapping):
        return _of_task(row)
    if any(row.get(name) is not None for name in _JSON_MIN):
        raise DataError(f"{where}: this is Label Studio's JSON-MIN; export the project as JSON")
    column = next((name for name in _ARGILLA if row.get(name) is not None), None)
    return None if column is None else _of_record(row, column, where)


def _of_record(row: Mapping[str, Any], column: str, where: str) -> list[Any]:
    """Answers of an Argilla record: a draft is no answer, and a discarded answer is a skip."""
    answers, states = row[column], row.get(f"{column}.status")
    answers = answers if isinstance(answers, list) else [answers]
    states = [None] * len(answers) if states is None else states if isinstance(states, list) else [states]
    if len(states) != len(answers):
        raise DataError(f"{where}: {column} has {len(answers)} answers and {len(states)} states; export it again")
    given = [(answer, state) for answer, state in zip(answers, states, strict=True) if state != "draft"]
    return ["skip" if state == "discarded" else answer for answer, state in given]


def _of_task(task: Mapping[str, Any]) -> list[Any]:
    """Answers of a Label Studio task: a choice `A`, `B`, `tie`, or the side that a pairwise control selected."""
    found: list[Any] = []
    for annotation in task.get("annotations") or []:
        if annotation.get("was_cancelled"):
            found.append("skip")
            continue
        for result in annotation.get("result") or []:
            value = result.get("value") or {}
            found += value.get("choices") or [value.get("selected", "")]
    return found
