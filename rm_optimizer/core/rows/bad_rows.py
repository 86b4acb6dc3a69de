"""Rows that give no pair: named by file and row, counted, and refused where they are too many."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.rows.readers import Row, row_unit
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import OnBadRow, Spelling

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
    num_bad = sum(causes.values())
    if num_bad <= max(1, max_share * num_rows):
        return
    most = sorted(causes.items(), key=lambda item: -item[1])[:_SHOWN_REASONS]
    reasons = "; ".join(f"{count}: {cause}" for cause, count in most)
    option = Spelling.current().option("max_bad_share", f"{math.ceil(num_bad / max(1, num_rows) * 100) / 100:g}")
    raise DataError(
        f"{path}: {num_bad} of {num_rows} rows are bad, more than the {max_share:.0%} that may be dropped ({reasons}); "
        f"correct the file or how its columns are mapped, or permit it with {option}"
    )


class RowTally:
    """Rows of a source that were read, that are bad and that give no pair.

    Args:
        path: the source as it was named.
        on_bad_row: stop at a bad row, or take note of it.
        max_bad_share: largest share of bad rows among all.

    Attributes:
        skipped: reported rows that give no pair.
        num_rows: rows read.
    """

    def __init__(self, path: str, on_bad_row: OnBadRow, max_bad_share: float) -> None:
        self.skipped: list[SkippedRow] = []
        self.num_rows = 0
        self.path, self.max_bad_share = path, max_bad_share
        self._on_bad_row = on_bad_row
        # A template refuses rows after the entrance has read them, and its block of `used` is left by then.
        self._entrance = Spelling.current()
        self._bad: dict[int, str] = {}

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
        if self._on_bad_row == OnBadRow.error:
            verb = "use" if self._entrance == Spelling.flags else "set"
            option = self._entrance.option("on_bad_row", OnBadRow.drop.value)
            raise DataError(f"{row}; correct it, or {verb} {option} to leave bad rows out")
        return row

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
        with self._entrance.used():
            require_few_bad(self.path, self.causes(numbers), num_rows, self.max_bad_share)


@dataclass(frozen=True, eq=False)
class PairRows:
    """The rows that pairs are of.

    Args:
        tallies: tallies of the sources.
        places: source and row number of each pair, shape (pairs, 2).
    """

    tallies: tuple[RowTally, ...] = ()
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @classmethod
    def of_source(cls, tally: RowTally, numbers: Sequence[int]) -> PairRows:
        """The rows of one source, by their numbers."""
        return cls((tally,), np.stack([np.zeros(len(numbers), dtype=np.int64), np.array(numbers, dtype=np.int64)], 1))

    @classmethod
    def joined(cls, parts: Sequence[PairRows]) -> PairRows:
        """The rows of all parts, one after another."""
        tallies = tuple(dict.fromkeys(tally for part in parts for tally in part.tallies))
        number = {tally: index for index, tally in enumerate(tallies)}
        places = [np.zeros((0, 2), dtype=np.int64)]
        for part in parts:
            own = np.array([number[tally] for tally in part.tallies], dtype=np.int64)
            places.append(np.stack([own[part.places[:, 0]], part.places[:, 1]], 1) if len(part.places) else places[0])
        return cls(tallies, np.concatenate(places))

    def take(self, positions: Sequence[int] | NDArray[np.int64]) -> PairRows:
        """The rows of the pairs at these positions."""
        return PairRows(self.tallies, self.places[np.asarray(positions, dtype=np.int64)])

    def refuse(self, reasons: Iterable[tuple[int, str]]) -> list[SkippedRow]:
        """Treat rows as bad by the positions of their pairs and the reasons, and return each once.

        Raises:
            DataError: if bad rows stop the reading of their source, or too many of its rows are bad.
        """
        refused: dict[tuple[int, int], SkippedRow] = {}
        for position, reason in reasons:
            source, number = self.places[position].tolist()
            if (source, number) not in refused:
                refused[source, number] = self.tallies[source].refuse(number, reason)
        for source in {source for source, _ in refused}:
            self.tallies[source].require_few_bad(self.places[self.places[:, 0] == source, 1].tolist())
            self.tallies[source].require_few_bad()
        return list(refused.values())
