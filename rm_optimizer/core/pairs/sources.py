"""Sources of preference pairs that `data.train` and `data.val` name, and how each is to be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rm_optimizer.core.pairs.formats import READ_COLUMNS
from rm_optimizer.core.pairs.layouts import LAYOUTS, Layout
from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, OPTIONAL_COLUMNS, read_number
from rm_optimizer.core.rows.readers import NamedFiles, Report, Row, read_rows, source_files, source_name
from rm_optimizer.errors import ConfigError, did_you_mean, nearest
from rm_optimizer.schema.data import DataConfig


@dataclass(frozen=True)
class DataSource:
    """One file or data set and how to read it.

    Args:
        path: a file, a saved `datasets` folder or a hub name.
        layout: description of its rows.
        weight: its share in a mixture: each pair counts `weight` times; a fraction takes a random part.
        inherited: names of the options that hold for all sources.
        name: name of the source, which pairs carry as `metadata["source"]`; the path's if it is empty.
        is_named: True if the name also replaces one in the rows, which then is the subset.
        rows: rows in memory, which are read in place of a file.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """

    path: str
    layout: Layout = field(default_factory=Layout)
    weight: float = 1.0
    inherited: frozenset[str] = field(default=frozenset(), compare=False)
    name: str = ""
    is_named: bool = False
    rows: Sequence[Row] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"the weight of source {self.path} must be positive, got {self.weight}")
        if not 0 <= layout.label <= 1:
            raise ConfigError(f"the label of source {self.path} must lie in [0, 1], got {layout.label}")
        object.__setattr__(self, "name", self.name or source_name(self.path))
        _ = layout.named_format, layout.verdicts
        ours = {*READ_COLUMNS, *OPTIONAL_COLUMNS, *CONTEXT_COLUMNS}
        for name, theirs in layout.columns.items():
            if name == "scores" and str(theirs).rpartition(".")[2].lower() in ("rank", "ranks", "ranking"):
                told = f"{theirs} must be mapped as ranks, not as scores"
                raise ConfigError(f"data.columns: ranks count from the best, so {told}")
            if theirs is not None and name not in ours and nearest(name, ours, 0.8):
                raise ConfigError(f"data.columns: {did_you_mean('column of ours', name, ours)}")

    def files(self) -> list[NamedFiles]:
        """Files of the source, by `source_files`; rows in memory count as one file."""
        return source_files(self.path) if self.rows is None else [NamedFiles(self.path, self.path, [self.path], [])]

    def stored(self, report: Report) -> Iterator[tuple[int, Row]]:
        """Numbered rows as they are stored, or those in memory; `report` is called for rows that cannot be read."""
        if self.rows is not None:
            return iter(enumerate(self.rows, 1))
        return read_rows(self.path, report, self.layout.encoding)


SOURCE_OPTIONS = ("path", "weight", "format", "columns", "winner", "label", "layout", "name")
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
    defaults = {name: getattr(options, name) for name in ("format", "columns", "winner", "layout")}
    defaults["columns"] = options.columns or {}
    found = []
    for item in items:
        own: Mapping[str, Any] = item if isinstance(item, Mapping) else {"path": item}
        if unknown := [name for name in own if name not in SOURCE_OPTIONS]:
            raise ConfigError(did_you_mean("option of a data source", str(unknown[0]), SOURCE_OPTIONS))
        path = own.get("path")
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ConfigError(f"a data source must be a path, a data-set name or {{path: …}}, got {item!r}")
        values = {"label": 1.0, "weight": 1.0, **defaults, **own}
        try:
            values |= {name: read_number(name, values[name]) for name in ("weight", "label")}
        except ValueError as error:
            raise ConfigError(f"data source {path}: {error}") from error
        inherited = frozenset(defaults.keys() - own.keys())
        name, layout = str(own.get("name") or ""), _layout_of(values)
        found.append(DataSource(os.fspath(path), layout, values["weight"], inherited, name, bool(name)))
    return tuple(found)


def _layout_of(options: Mapping[str, Any]) -> Layout:
    """The layout of a source's options; `format`, `columns`, `winner` and `label` count more than its keys."""
    layout, form = Layout.of(options["layout"]), options["format"]
    named = LAYOUTS[form].to_dict() if form in LAYOUTS else {"format": form}
    own = {name: options[name] for name in ("winner", "label") if options[name] not in (None, 1.0)}
    columns = {**layout.columns, **named.pop("columns", {}), **options["columns"]}
    return replace(layout, columns=columns, **named | own)
