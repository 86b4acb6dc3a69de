"""Machine-readable diagnosis of a reward model: checks, each with its measured and its expected value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias

from rm_optimizer.records.codec import JsonRecord

MeasuredValue: TypeAlias = float | str | None
"""Value that a check measured: a number, words, or None if there is no finite number."""

FAILED_EXIT_CODE = 4
"""Exit code of a diagnosis with a failed check; it is 0 if there are only warnings."""


class Status(StrEnum):
    """Outcome of a check or of the whole diagnosis."""

    ok = "ok"
    warn = "warn"
    """Likely mistake, or a notable property; the model can be used."""
    fail = "fail"
    """Rewards are wrong, or differ from those that training optimized or that a server will return."""
    skipped = "skipped"
    """Check that does not apply here, with the reason in its explanation."""


@dataclass(frozen=True)
class Check:
    """Measurement of one known fault of reward models.

    Args:
        name: stable name of the check, in `snake_case`; empty until the registry names it.
        status: outcome of the check.
        measured: measured value; None if there is no finite number.
        unit: unit of a number, in words; empty for words.
        expected: expected value, in words.
        explanation: one sentence, with the remedy if something is wrong.
        details: further numbers and words.
    """

    name: str
    status: Status
    measured: MeasuredValue
    unit: str
    expected: str
    explanation: str
    details: Mapping[str, MeasuredValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "measured", _finite(self.measured))
        object.__setattr__(self, "details", {name: _finite(value) for name, value in self.details.items()})


@dataclass(frozen=True)
class Diagnosis(JsonRecord, indent=2, ensure_ascii=False, rows="checks"):
    """All checks of one model, and the verdict.

    Args:
        model: name of the model, in words.
        seed: seed of every random choice.
        num_pairs: number of given pairs of each data set.
        num_pairs_scored: number of these pairs whose rewards were computed.
        num_pairs_audited: number of these pairs whose text was audited.
        wall_seconds: duration in seconds.
        checks: the checks, in the order in which they were made.
    """

    model: str
    seed: int
    num_pairs: Mapping[str, int]
    num_pairs_scored: Mapping[str, int]
    num_pairs_audited: Mapping[str, int]
    wall_seconds: float
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Status:
        """`fail` if a check failed, else `warn` if one warns, else `ok`."""
        found = {check.status for check in self.checks}
        return next((status for status in (Status.fail, Status.warn) if status in found), Status.ok)

    @property
    def exit_code(self) -> int:
        """0 for `ok` and `warn`, `FAILED_EXIT_CODE` for `fail`."""
        return FAILED_EXIT_CODE if self.verdict is Status.fail else 0

    def check(self, name: str) -> Check:
        """The check of that name.

        Raises:
            KeyError: if there is none.
        """
        return {check.name: check for check in self.checks}[name]

    def names(self, status: Status) -> list[str]:
        """Names of the checks with this status."""
        return [check.name for check in self.checks if check.status is status]

    def entries(self) -> dict[str, Any]:
        """The verdict, the exit code and the fields."""
        return {"verdict": self.verdict, "exit_code": self.exit_code, **super().entries()}


def skipped(expected: str, reason: str) -> Check:
    """A check that does not apply here; its caller names it."""
    return Check("", Status.skipped, None, "", expected, reason)


def judged(
    is_good: bool,
    measured: MeasuredValue,
    unit: str,
    expected: str,
    good: str,
    bad: str,
    *,
    otherwise: Status = Status.fail,
    details: Mapping[str, MeasuredValue] = MappingProxyType({}),
) -> Check:
    """The check that is ok with the sentence `good`, or has the status `otherwise` with the sentence `bad`.

    Its caller names it.
    """
    status, explanation = (Status.ok, good) if is_good else (otherwise, bad)
    return Check("", status, measured, unit, expected, explanation, details)


def _finite(value: MeasuredValue) -> MeasuredValue:
    return None if isinstance(value, float) and not math.isfinite(value) else value
