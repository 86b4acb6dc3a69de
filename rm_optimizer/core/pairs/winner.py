"""Ways in which the cells of a winner column tell the better of two responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from rm_optimizer.core.rows.columns import read_number
from rm_optimizer.core.rows.messages import is_empty
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import ConfigError

FORM = "FIRST,SECOND or FIRST,SECOND,TIE, with | between values that mean the same"
_NUMBERS = {"one_hot": (2, 3), "votes": (2,), "scores": (2,)}
"""Kinds of which each row has one number for each response, and how many: `one_hot` may have one for ties."""
TODO = "TODO"
"""Placeholder in a suggestion for what only a person can tell."""
_FEW_VALUES = 8
_NOUNS = r"(?:model|response|answer|assistant|output|completion|candidate|conversation|option|side)[_ -]?"
_TIES = re.compile(r"ties?\b|draw$|equal$|same$|both|neither$")
_SCALES = ("strength", "probability")


class Verdict(NamedTuple):
    """Preference of a row between two responses.

    Args:
        label: probability that the first response is the better one.
        margin: strength of the preference, where the column tells it.
        votes: votes for the first and for the second response, where several were cast.
        scores: scores of both, where they tell the preference.
    """

    label: float
    margin: float | None = None
    votes: tuple[float, float] | None = None
    scores: tuple[float, float] | None = None


@dataclass(frozen=True)
class Winner:
    """Meaning of a winner column, as the option `winner` gives it.

    Args:
        kind: `values`, `majority` (values of several annotators, of which most decide), `one_hot`, `votes`, `scores`,
            `strength` or `probability`.
        values: label by the value of a cell, for `values` and `majority`.
        ends: numbers by which the first and the second response are surely better, for `strength` and `probability`.
    """

    kind: str
    values: Mapping[str, float] = field(default_factory=dict)
    ends: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def parse(cls, option: object) -> Winner:
        """The meaning that an option gives.

        Args:
            option: a list of two or three values or lists of values, or text as in `FORM`; `one_hot`, `votes` or
                `scores` for a column of several numbers; or a kind before a colon, as `majority:1,2,0`,
                `strength:-3,3` and `probability:1,2`.

        Raises:
            ConfigError: if it is something else, or has a value twice.

        Example:
            >>> Winner.parse("model_a,model_b,tie|tie (bothbad)").read("Tie").label
            0.5
            >>> Winner.parse("strength:-3,3").read(2).margin
            2.0
        """
        kind, colon, rest = option.partition(":") if isinstance(option, str) else ("", "", "")
        if kind in _NUMBERS and not colon:
            return cls(kind)
        if kind not in _SCALES or not colon:
            is_majority = kind == "majority" and colon
            return cls("majority", _values(rest)) if is_majority else cls("values", _values(option))
        with suppress(ValueError):
            first, second = (read_number("winner", end) for end in rest.split(","))
            if first != second:
                return cls(kind, ends=(first, second))
        told = f"the numbers of the first and the second response as {kind}:1,2"
        raise ConfigError(f"winner must name {told}, got {option!r}")

    def read(self, value: object) -> Verdict:
        """Return the preference that a cell states.

        Raises:
            ValueError: if it states none that the option names.
        """
        if self.kind in _NUMBERS:
            return self._of_numbers(value)
        if self.kind in _SCALES:
            number, (first, second), (low, high) = read_number("winner", value), self.ends, sorted(self.ends)
            if not low <= number <= high:
                raise ValueError(f"winner must lie in [{low:g}, {high:g}], got {number:g}")
            if self.kind == "probability":
                return Verdict((second - number) / (second - first))
            label = _better(abs(number - second), abs(number - first))
            return Verdict(label, abs(number - (first + second) / 2))
        told = [self._label(each) for each in cells_in(value) if not is_empty(each)] or [self._label(value)]
        mean = sum(told) / len(told)
        votes = (float(told.count(1.0)), float(told.count(0.0))) if len(told) > 1 else None
        return Verdict(_better(mean, 0.5) if self.kind == "majority" else mean, None, votes)

    def _label(self, value: object) -> float:
        if (key := _value_key(value)) not in self.values:
            raise ValueError(f"winner must be one of {', '.join(sorted(self.values))}, got {value!r}")
        return self.values[key]

    def _of_numbers(self, value: object) -> Verdict:
        if not isinstance(value, list) or len(value) not in _NUMBERS[self.kind]:
            raise ValueError(f"winner must be a list of {_NUMBERS[self.kind][0]} numbers, got {value!r}")
        first, second, tie = (*(read_number("winner", number) for number in value), 0.0)[:3]
        if self.kind == "scores":
            return Verdict(_better(first, second), abs(first - second), None, (first, second))
        if self.kind == "votes":
            if min(first, second) < 0 or first + second == 0:
                raise ValueError(f"votes must be counts of which one is positive, got {first:g} and {second:g}")
            return Verdict(first / (first + second), None, (first, second))
        if sorted((first, second, tie)) != [0, 0, 1]:
            raise ValueError(f"exactly one of the winner's numbers must be 1 and the others 0, got {value}")
        return Verdict(first + 0.5 * tie)


def _better(first: float, second: float) -> float:
    """Label of two numbers, of which the larger one is better."""
    return 0.5 + 0.5 * ((first > second) - (first < second))


def _values(option: object) -> dict[str, float]:
    items = option.split(",") if isinstance(option, str) else option
    if not isinstance(items, Sequence) or len(items) not in (2, 3):
        raise ConfigError(f"winner must name the values of the winner column as {FORM}, got {option!r}")
    found = dict[str, float]()
    for item, label in zip(items, (1.0, 0.0, 0.5), strict=False):
        same = item.split("|") if isinstance(item, str) else item
        for value in same if isinstance(same, Sequence) else [same]:
            if found.setdefault(_value_key(value), label) != label:
                raise ConfigError(f"winner must name each value of the winner column once, got {option!r}")
    return found


def _value_key(value: object) -> str:
    """The value as text that is the same for `1`, `1.0` and `"1"`, and for `Tie` and `tie`."""
    text = str(value).strip().casefold()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def cells_in(value: Any) -> list[Any]:
    """The cells in lists of any depth."""
    return [*chain.from_iterable(map(cells_in, value))] if isinstance(value, list | tuple) else [value]


def few_values(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The values of a column of few values; none if there are many."""
    values = {str(row[name]) for row in rows if isinstance(row.get(name), str | int | float)}
    return sorted(values) if len(values) <= _FEW_VALUES and all(len(value) < 40 for value in values) else []


def named_values(rows: Sequence[Row], name: str, sides: Sequence[str]) -> list[Any]:
    """Values of a column that name the first of two sides, the second and ties; `TODO` where they do not say so."""
    places: dict[int, list[str]] = {1: [], -1: [], 0: [], 2: []}
    for value in few_values(rows, name):
        places[named_side(value, sides) or (0 if _TIES.match(value.casefold()) else 2)].append(value)
    if not (places[1] and places[-1]):
        return [TODO] * 3
    listed = [each[0] if len(each) == 1 else each for each in (places[1], places[-1], places[0]) if each]
    return [*listed[:2], TODO] if places[2] else listed


def named_side(value: Any, *sides: Sequence[str]) -> int:
    """1 for a value that names the first of two sides, -1 for the second, and 0 for any other.

    A value names a side by its whole name, or by the letter that tells the sides apart, alone or behind a word. The
    numbers 0 and 1 mean either side in one data set or another.

    Args:
        value: cell of a column.
        sides: names of the two sides, in one or several ways.
    """
    text = str(value).casefold()
    for both in sides:
        marks = [re.search(r"(?:^|[\W_])([a-z])$", side.casefold()) for side in both]
        names = [
            re.escape(side.casefold()) + (f"|{mark[1]}" if mark else "") for side, mark in zip(both, marks, strict=True)
        ]
        first, second = (re.fullmatch(rf"(?:{_NOUNS})?(?:{name})", text) is not None for name in names)
        if first != second:
            return 1 if first else -1
    return 0
