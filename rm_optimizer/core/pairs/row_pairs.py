"""Preference pairs of the rows of a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rm_optimizer.core.pairs.formats import OPTIONAL_COLUMNS, RowFormat
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, in_context, read_number
from rm_optimizer.core.rows.messages import is_empty
from rm_optimizer.core.rows.readers import Report, Row
from rm_optimizer.schema.data import KwiseRule


def numbered_pairs(
    source: DataSource,
    form: RowFormat,
    rows: Iterable[tuple[int, Row]],
    kwise_rule: KwiseRule,
    *,
    report: Report,
    skip: Report,
) -> Iterator[tuple[int, PreferencePair]]:
    """The pairs of rows, each with the number of its row.

    Args:
        source: source of the rows.
        form: their format.
        rows: numbered rows under our column names.
        kwise_rule: pairs that a row of many scored responses gives.
        report: function called for each bad row.
        skip: function called for rows that are not bad and give no pair.
    """
    maker = _PairMaker(source, form)
    for number, row in rows:
        try:
            pairs, reason = maker.pairs(number, row, kwise_rule)
        except ValueError as error:
            report(number, str(error))
            continue
        except RecursionError:
            report(number, "its values are nested too deeply")
            continue
        if reason is not None:
            report(number, f"a pair of it is bad ({reason}), and left out")
        if not pairs and reason is None:
            skip(number, "no pair: no two responses that differ in text and score")
        yield from ((number, pair) for pair in pairs)


class _PairMaker:
    """Makes pairs of the comparisons of a source's rows."""

    def __init__(self, source: DataSource, form: RowFormat) -> None:
        self._source = source
        self._form = form
        self._winner = source.winner_values if form.name == "winner" else None
        self._own = form.columns | set(OPTIONAL_COLUMNS) | CONTEXT_COLUMNS

    def pairs(self, number: int, row: Row, kwise_rule: KwiseRule) -> tuple[list[PreferencePair], str | None]:
        """The row's pairs, and why another of its comparisons is none.

        Raises:
            ValueError: if the row cannot be compared, its winner is unknown, or none of its comparisons is a pair.
        """
        shared = self._metadata(number, row)
        told = row if self._winner is None else row | {"winner": self._winner.preference(row.get("winner"))}
        comparisons = self._form.compare(told, kwise_rule)
        margin, label, weight = (_optional(row, name) for name in OPTIONAL_COLUMNS)
        pairs: list[PreferencePair] = []
        reason: str | None = None
        for item in comparisons:
            own_label = self._source.label if item.label is None else item.label
            try:
                pair = PreferencePair(
                    in_context(row, item.prompt, self._source.columns),
                    item.chosen,
                    item.rejected,
                    margin=margin if margin is not None else item.margin,
                    metadata=shared | _kept(item.extra.items()),
                    label=own_label if label is None else label,
                    weight=1.0 if weight is None else weight,
                )
            except ValueError as error:
                reason = str(error)
            else:
                pairs.append(pair)
        if reason is not None and not pairs:
            raise ValueError(reason)
        return pairs, reason

    def _metadata(self, number: int, row: Row) -> dict[str, Any]:
        """Other columns as they are; those of a `metadata` column, as `PreferencePair.to_dict` writes it, join them."""
        metadata = _kept((name, value) for name, value in row.items() if name not in self._own)
        if isinstance(metadata.get("metadata"), dict):
            metadata = _kept(metadata.pop("metadata").items()) | metadata
        metadata.setdefault("source", self._source.name)
        if self._form.makes_groups:
            metadata["group"] = f"{self._source.name}:{number}"
        return metadata


def _optional(row: Row, name: str) -> float | None:
    """A number, or None where it is missing: null, NaN or blanks."""
    value = row.get(name)
    is_missing = is_empty(value) or (isinstance(value, str) and value.strip().casefold() in ("nan", "none"))
    return None if is_missing else read_number(name, value)


def _kept(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value != "" and _is_json(value)}


def _is_json(value: object) -> bool:
    """True if JSON can express the value; NaN is a missing number, and bytes or dates are left out."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return abs(value) < float("inf")
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, dict) and all(isinstance(name, str) and _is_json(item) for name, item in value.items())
