"""Rows that give no pair: named by file and row, counted, and refused where they are too many."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rm_optimizer.core.rows.readers import Row, row_unit
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import DataConfig, OnBadRow, Spelling

_SHOWN_REASONS = 5
_CAUSE_ENDS = re.compile(r", got |, not |, such as |, which begins |, first message | \(")


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that gave no pair.

    Args:
        path: the source as it was named.
        row: its number: the line in JSON Lines and CSV, the row in others, from 1.
        reason: why it gave none.
    """

    path: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {row_unit(self.path)} {self.row}: {self.reason}"


def cause_of(reason: str) -> str:
    """The reason of a bad row without what is its own, so that equal causes can be counted."""
    return _CAUSE_ENDS.split(reason)[0]


def require_few_bad(path: str, causes: Mapping[str, int], num_rows: int, max_share: float) -> None:
    """Refuse to go on with a file of which too many rows are bad.

    Args:
        path: the file.
        causes: bad rows by their cause.
        num_rows: rows looked at.
        max_share: largest share of them that may be bad; a single row always may.

    Raises:
        DataError: if more are bad.
    """
    if (num_bad := sum(causes.values())) <= max(1, max_share * num_rows):
        return
    reasons = "; ".join(f"{count}: {cause}" for cause, count in Counter(causes).most_common(_SHOWN_REASONS))
    option = Spelling.current().option("max_bad_share", f"{math.ceil(num_bad / max(1, num_rows) * 100) / 100:g}")
    raise DataError(
        f"{path}: {num_bad} of {num_rows} rows are bad, more than the {max_share:.0%} that may be dropped ({reasons}); "
        f"correct the file or how its columns are mapped, or permit it with {option}"
    )


class RowTally:
    """Rows of a source that were read, that are bad and that give no pair.

    Args:
        path: the source as it was named.
        options: stop at a bad row or take note of it, and the largest share of bad rows among all.

    Attributes:
        skipped: reported rows that give no pair.
        num_rows: rows read.
        layout: name of the layout by which rows are read; empty for a format alone.
        stops: True if the first bad row ends the reading.
        entrance: form in which the user typed the options.
    """

    def __init__(self, path: str, options: DataConfig, layout: str = "") -> None:
        self.skipped: list[SkippedRow] = []
        self.num_rows = 0
        self.path, self.max_bad_share, self.layout = path, options.max_bad_share, layout
        self.stops = options.on_bad_row == OnBadRow.error
        # A template refuses rows after the entrance has read them, and its block of `used` is left by then.
        self.entrance = Spelling.current()
        self._bad: dict[int, str] = {}

    @classmethod
    def of_trial(cls, path: str) -> RowTally:
        """A tally that never stops, for rows that are read once more."""
        return cls(path, DataConfig(on_bad_row=OnBadRow.drop, max_bad_share=1.0))

    def counted(self, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        """The rows, counted."""
        for numbered in rows:
            self.num_rows += 1
            yield numbered

    def report_unread(self, number: int, reason: str) -> None:
        """Take note of a row that could not be read at all, or stop."""
        self.num_rows += 1
        self.report(number, reason)

    def report(self, number: int, reason: str) -> None:
        """Take note of a bad row, or stop."""
        self.skipped.append(self.refuse(number, reason))

    def refuse(self, number: int, reason: str) -> SkippedRow:
        """Count a bad row and return it, or stop."""
        self._bad.setdefault(number, reason)
        row = SkippedRow(self.path, number, reason)
        if not self.stops:
            return row
        verb, option = "use" if self.entrance == Spelling.flags else "set", self.entrance.option("on_bad_row", "drop")
        by = f" (layout {self.layout})" if self.layout and self.layout not in reason else ""
        raise DataError(f"{row}{by}; correct it, or {verb} {option} to leave bad rows out")

    def skip(self, number: int, reason: str) -> None:
        """Take note of a row that gives no pair."""
        self.skipped.append(SkippedRow(self.path, number, reason))

    def causes(self, among: Iterable[int] | None = None) -> Counter[str]:
        """Bad rows by their cause, all or those `among` these."""
        bad = self._bad.values() if among is None else (self._bad[row] for row in among if row in self._bad)
        return Counter(map(cause_of, bad))

    def nothing_left(self) -> DataError:
        """The error of a source without a pair."""
        if not self.skipped:
            return DataError(f"{self.path}: the file holds no rows")
        return DataError(f"none of {len(self.skipped)} rows gives a pair; the first: {self.skipped[0]}")

    def require_few_bad(self, among: Iterable[int] | None = None) -> None:
        """Raise where too many of all rows are bad, or of those `among` that were looked at once more."""
        numbers = None if among is None else set(among)
        num_rows = self.num_rows if numbers is None else len(numbers)
        with self.entrance.used():
            require_few_bad(self.path, self.causes(numbers), num_rows, self.max_bad_share)


class PairRow(NamedTuple):
    """Row of a source that gives a pair.

    Args:
        tally: tally of the source.
        number: number of the row.
    """

    tally: RowTally
    number: int
