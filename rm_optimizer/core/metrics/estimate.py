"""A number with its uncertainty, and numbers that a program hands over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from rm_optimizer.errors import CheckpointError, DataError
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
        low: lower end of the 95 % interval, or None without an interval.
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


UNKNOWN = Estimate(math.nan, None, 0)
"""Estimate of what could not be measured."""


def finite_array(values: ArrayLike, name: str, axes: Sequence[str]) -> Float64[np.ndarray, ...]:
    """Numbers of a list, array or tensor on any device as float64, one axis for each name.

    Args:
        values: the numbers.
        name: what they are, for the message, in the plural.
        axes: what the axes count, outermost first, in the singular.

    Raises:
        DataError: if the list is empty, a value is no finite number, or the rows have another form.

    Example:
        >>> finite_array([[1, 2], [3]], "rewards", ["prompt", "sample"])
        Traceback (most recent call last):
        ...
        rm_optimizer.errors.DataError: rewards must be numbers by (prompt, sample), one length in each axis, got ...
    """
    form = f"{name} must be numbers by ({', '.join(axes)}), one length in each axis"
    try:
        on_cpu = values.detach().cpu() if hasattr(values, "detach") else values
        array = np.asarray(on_cpu.double() if hasattr(on_cpu, "double") else on_cpu, dtype=np.float64)
    except (TypeError, ValueError) as error:
        table = values.to_numpy() if hasattr(values, "to_numpy") else values
        raise DataError(f"{form}, got {_misfit(table, axes) or ' '.join(str(error).split())}") from error
    if array.ndim != len(axes) or not array.size:
        raise DataError(f"{form}, got the shape {array.shape}")
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0]
        where = ", ".join(f"{axis} {index + 1}" for axis, index in zip(axes, place, strict=True))
        raise DataError(f"{name} must be finite, got {array[tuple(place)]} in {where}; leave it out or check the model")
    return array


def require_finite(rewards: Sequence[float], name: Callable[[int], str]) -> None:
    """Refuse rewards that are NaN or infinite; called before rewards are returned, printed or written.

    Args:
        rewards: rewards of one model, in any order.
        name: function of an index that returns the reward's name for the message, such as `response 3`.

    Raises:
        CheckpointError: if there are such rewards, with their number and the first one.
    """
    broken = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
    if broken:
        found = f"{len(broken)} of {len(rewards)} rewards are not finite, the first is {rewards[broken[0]]}"
        told = "the model's weights are broken, or overflow in the type it computes in; give another checkpoint"
        raise CheckpointError(f"{found} for {name(broken[0])}: {told}")


def _misfit(values: Any, axes: Sequence[str], before: str = "") -> str | None:
    """First entry of nested rows that is no number or has another length, with its place; None if all fit."""
    if not hasattr(values, "__len__"):
        return None
    rows = list(values)
    for number, entry in enumerate(rows, 1):
        where = f"{before}{axes[0]} {number}"
        if len(axes) == 1:
            try:
                float(entry)
            except (TypeError, ValueError):
                return f"{entry!r} in {where}"
        elif isinstance(entry, str) or not hasattr(entry, "__len__"):
            return f"{entry!r} in {where}"
        elif len(entry) != len(rows[0]):
            return f"length {len(entry)} in {where}, but {len(rows[0])} in {before}{axes[0]} 1"
        elif (found := _misfit(entry, axes[1:], f"{where}, ")) is not None:
            return found
    return None
