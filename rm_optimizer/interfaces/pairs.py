"""How the commands read preference data: their flags, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema.data import MAX_BAD_SHARE, OnBadRow, Spelling


@dataclass(frozen=True)
class Reading:
    """The reading flags as typed.

    Args:
        format: row format, or `auto`.
        columns: `OURS=THEIRS` items.
        on_bad_row: `error` or `drop`.
        winner: values of the winner column as typed, or None.
        max_bad_share: most bad rows that may be dropped, as a share of a source's rows.
    """

    format: str
    columns: tuple[str, ...]
    on_bad_row: str
    winner: str | None = None
    max_bad_share: float = MAX_BAD_SHARE

    def load(self, source: str | Sequence[str]) -> PreferenceDataset:
        """Read one source, or several as one data set.

        Raises:
            ConfigError: if a flag's value is unknown.
            DataError: if the source cannot be used.
        """
        known = [choice.value for choice in OnBadRow]
        if self.on_bad_row not in known:
            raise ConfigError(did_you_mean("--on-bad-row", self.on_bad_row, known))
        return PreferenceDataset.load(
            source if isinstance(source, str) else list(source),
            format=self.format,
            columns=self.column_mapping(),
            winner=self.winner,
            on_bad_row=self.on_bad_row,
            max_bad_share=self.max_bad_share,
            spelling=Spelling.flags,
        )

    def column_mapping(self) -> dict[str, str | None] | None:
        """`{ours: theirs}`, or None where no column is mapped; `OURS=null` leaves a column out.

        Raises:
            ConfigError: if an item is not `OURS=THEIRS`.
        """
        items = [item.partition("=") for item in self.columns]
        for ours, equals, theirs in items:
            if not (ours and equals and theirs):
                raise ConfigError(f"--columns takes OURS=THEIRS, such as prompt=question, got '{ours}{equals}{theirs}'")
        return {ours: None if theirs == "null" else theirs for ours, _, theirs in items} or None
