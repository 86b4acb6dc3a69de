"""A number with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rm_optimizer.records.codec import JsonRecord

CONFIDENCE = 0.95
"""Nominal coverage of an interval."""


class IntervalKind(StrEnum):
    """Origin of an interval."""

    resampled = "resampled"
    """Bootstrap over resampled prompts, pairs or runs."""
    student = "student"
    """Student's interval of a mean over independent draws, such as random vectors or seeds."""
    wilson = "wilson"
    """Wilson's interval of a bounded value."""
    normal = "normal"
    """Normal interval from an estimate of the variance."""
    chi_squared = "chi_squared"
    """Interval of a sum of squares, from its mean and variance over independent draws."""
    bounds = "bounds"
    """Limits from error bounds of the number's parts, without a probability."""
    exact = "exact"
    """No error but rounding."""


@dataclass(frozen=True)
class Estimate(JsonRecord):
    """A measured number with its uncertainty.

    Args:
        value: the estimate; NaN where nothing could be measured.
        standard_error: standard deviation of the estimate over repetitions, or None where unknown.
        num_samples: independent samples behind it (prompts, where pairs share prompts).
        low: lower end of the 95 % interval, or None where there is none.
        high: upper end of the 95 % interval.
        kind: origin of the interval; None where there is no interval.

    Example:
        >>> str(Estimate(0.7312, 0.0094, 2100, low=0.7121, high=0.7493))
        '0.731 [0.712, 0.749]'
        >>> f"{Estimate(0.7312, 0.0094, 2100):.2f}"
        '0.73 ± 0.01'
    """

    value: float
    standard_error: float | None
    num_samples: int
    low: float | None = None
    high: float | None = None
    kind: IntervalKind | None = None

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        if math.isnan(self.value):
            return "n/a"
        if self.low is not None and self.high is not None:
            return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"
        if self.standard_error is not None:
            return f"{self.value:{spec}} ± {self.standard_error:{spec}}"
        return f"{self.value:{spec}}"

    def __str__(self) -> str:
        return format(self, "")
