"""Sources of preference pairs that `data.train` and `data.val` name, and how each is to be read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rm_optimizer.core.pairs.formats import LAYOUTS, OPTIONAL_COLUMNS, READ_COLUMNS, RowFormat, row_format
from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, Columns, read_number
from rm_optimizer.core.rows.readers import NamedFiles, Row, source_files, source_name
from rm_optimizer.errors import ConfigError, did_you_mean, nearest
from rm_optimizer.schema.data import DataConfig

FORM = "FIRST,SECOND or FIRST,SECOND,TIE, with | between values that mean the same"


def parse_winner(option: object) -> dict[str, float]:
    """Probability that `response_a` is better, by the values of the winner column that an option names.

    Args:
        option: a list of two or three values or lists of values, or text as in `FORM`.

    Raises:
        ConfigError: if there are not two or three, or one stands twice.
    """
    items = option.split(",") if isinstance(option, str) else option
    if not isinstance(items, Sequence) or len(items) not in (2, 3):
        raise ConfigError(f"winner must name the values of the winner column as {FORM}, got {option!r}")
    found = dict[str, float]()
    for item, preference in zip(items, (1.0, 0.0, 0.5), strict=False):
        same = item.split("|") if isinstance(item, str) else item
        for value in same if isinstance(same, Sequence) else [same]:
            if found.setdefault(_value_key(value), preference) != preference:
                raise ConfigError(f"winner must name each value of the winner column once, got {option!r}")
    return found


def preference(values: Mapping[str, float], value: object) -> float:
    """Probability that `response_a` is better by the value of a winner column: 1, 0 or 0.5.

    Args:
        values: `parse_winner` of the option.
        value: the cell.

    Raises:
        ValueError: if the value names none of the three.

    Example:
        >>> values = parse_winner("model_a,model_b,tie|tie (bothbad)")
        >>> [preference(values, name) for name in ("model_b", "Tie")]
        [0.0, 0.5]
    """
    if (key := _value_key(value)) not in values:
        raise ValueError(f"winner must be one of {', '.join(sorted(values))}, got {value!r}")
    return values[key]


def _value_key(value: object) -> str:
    """The value as text that is the same for `1`, `1.0` and `"1"`, and for `Tie` and `tie`."""
    text = str(value).strip().casefold()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


@dataclass(frozen=True)
class DataSource:
    """One file or data set and how to read it.

    Args:
        path: a file, a saved `datasets` folder or a hub name.
        weight: its share in a mixture: each pair counts `weight` times; a fraction takes a random part.
        format: name of a row format or of a registered layout, whose options hold where the source has none; or "auto".
        columns: column mapping, our name to the file's or to a path such as `answer.text`; None leaves the column out.
        winner: values of the `winner` column that name the better response, as `parse_winner` reads them.
        label: the preference probability of rows that carry none, 0.5 for a file of ties.
        inherited: names of the options that are those of all sources.
        name: name of the source, which its pairs carry as `metadata["source"]`; that of the path if it is empty.
        rows: rows in memory, which are read in place of a file.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """

    path: str
    weight: float = 1.0
    format: str = "auto"
    columns: Columns = field(default_factory=dict)
    winner: Any = None
    label: float = 1.0
    inherited: frozenset[str] = field(default=frozenset(), compare=False)
    name: str = ""
    rows: Sequence[Row] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"the weight of source {self.path} must be positive, got {self.weight}")
        if not 0 <= self.label <= 1:
            raise ConfigError(f"the label of source {self.path} must lie in [0, 1], got {self.label}")
        layout = LAYOUTS.get(self.format) or {"format": self.format}
        own = {"columns": {**layout.get("columns", {}), **self.columns}, "format": layout.get("format", "auto")}
        for name, unset in (("winner", None), ("label", 1.0)):
            if name in layout and getattr(self, name) == unset:
                own[name] = layout[name]
        for name, value in own.items():
            object.__setattr__(self, name, value)
        _ = self.named_format, self.winner_values
        object.__setattr__(self, "name", self.name or source_name(self.path))
        ours = {*READ_COLUMNS, *OPTIONAL_COLUMNS, *CONTEXT_COLUMNS}
        for name, theirs in self.columns.items():
            if name == "scores" and str(theirs).rpartition(".")[2].lower() in ("rank", "ranks", "ranking"):
                raise ConfigError(
                    f"data.columns: ranks count from the best, so {theirs} must be mapped as ranks, not as scores"
                )
            if theirs is not None and name not in ours and nearest(name, ours, 0.8):
                raise ConfigError(f"data.columns: {did_you_mean('column of ours', name, ours)}")

    def files(self) -> list[NamedFiles]:
        """Files of the source, by `source_files`; rows in memory count as one file."""
        return source_files(self.path) if self.rows is None else [NamedFiles(self.path, self.path, [self.path], [])]

    @cached_property
    def named_format(self) -> RowFormat | None:
        """The row format that the option names; None where the first rows tell."""
        return None if self.format == "auto" else row_format(self.format)

    @cached_property
    def winner_values(self) -> Mapping[str, float] | None:
        """Meaning of the values of the winner column, by `parse_winner`; None where no option gives them."""
        return None if self.winner is None else parse_winner(self.winner)


SOURCE_OPTIONS = ("path", "weight", "format", "columns", "winner", "label")
"""Options of one source, as a mapping in `data.train` has them."""


def parse_sources(source: object, options: DataConfig) -> tuple[DataSource, ...]:
    """The sources that an option names: a path or hub name, a mapping with `path`, or a list of these.

    Args:
        source: the option's value.
        options: format, columns and winner of sources that do not bring their own.

    Raises:
        ConfigError: if it names none, or an option of a source is unknown or has the wrong type.

    Example:
        >>> sources = parse_sources(["a.csv", {"path": "b.csv", "weight": 2}], DataConfig())
        >>> [source.weight for source in sources]
        [1.0, 2.0]
    """
    items = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if not items:
        raise ConfigError("a data source must name a file or data set, got an empty list")
    defaults = {"format": options.format, "columns": options.columns or {}, "winner": options.winner}
    found = []
    for item in items:
        own: Mapping[str, Any] = item if isinstance(item, Mapping) else {"path": item}
        if unknown := [name for name in own if name not in SOURCE_OPTIONS]:
            raise ConfigError(did_you_mean("option of a data source", str(unknown[0]), SOURCE_OPTIONS))
        path = own.get("path")
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ConfigError(f"a data source must be a path, a data-set name or {{path: …}}, got {item!r}")
        try:
            numbers = {name: read_number(name, own[name]) for name in ("weight", "label") if name in own}
        except ValueError as error:
            raise ConfigError(f"data source {path}: {error}") from error
        values = {**defaults, **own, **numbers, "path": os.fspath(path)}
        found.append(DataSource(**values, inherited=frozenset(defaults.keys() - own.keys())))
    return tuple(found)
