"""Layouts: descriptions of tables of preferences by the options that read them, published ones and users' own."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import translate
from functools import cache, cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rm_optimizer.core.pairs.formats import FORMATS, READ_COLUMNS, RowFormat
from rm_optimizer.core.pairs.winner import Winner
from rm_optimizer.core.rows.columns import (
    CONTEXT_COLUMNS,
    OPTIONAL_COLUMNS,
    UNREAD_COLUMNS,
    Columns,
    cell,
    columns_at,
    columns_of,
    folded,
    is_missing,
    paths_of,
    read_number,
    renamed,
    root_of,
    texts_in,
)
from rm_optimizer.core.rows.messages import is_empty, is_message, parsed
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import ConfigError, DataError, did_you_mean
from rm_optimizer.schema.checks import require_options
from rm_optimizer.schema.composition import config_root, described
from rm_optimizer.schema.data import Spelling
from rm_optimizer.schema.registry import Registry

_CONTENT = {
    *READ_COLUMNS, *CONTEXT_COLUMNS, *UNREAD_COLUMNS, "question", "instruction", "query", "conversation",
    "conversations", "trajectory", "accepted", "preferred", "dispreferred", "messages", "persona", "passage", "problem",
}  # fmt: skip
"""Names of columns that a layout must read or ignore, unless their texts are also in what it reads."""
_CANDIDATES = frozenset({"chosen", "rejected", "response_a", "response_b", "responses"})
_ACCOUNTS = ("has", "lacks", "optional", "ignore", "range")
"""Keys of a layout that recognize a table and account for its columns."""
_UNDECIDED = frozenset({"tie", "both_bad", "bothbad", "tie (bothbad)", "draw", "discarded", "skipped", "invalid"})
"""Cells that take the preference of a row back, in a column that the layout must read or ignore."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Description of a table of preferences.

    Args:
        name: name of the layout's file; empty for a mapping and a registered layout.
        format: row format, or "auto".
        columns: our column name to the table's, as the option `columns` has it.
        parse: columns of the table, and paths that `columns` maps, whose text is read as the list or object that it
            spells, in JSON or as Python prints it; so is that of columns that a path leads into. None if nothing tells,
            and text that spells messages elsewhere is refused.
        winner: meaning of the winner column, as the option `winner` has it.
        label: preference probability of rows that carry none.
        where: values that a row must have, by column or path: a value, a list of them, or `{not: …}`. Of a list of
            objects, only those that differ are left out.
        group: columns that single responses of one prompt must share to be compared.
        tree: columns of a tree of messages, as `gather_trees` takes them.
        range: least and greatest number of a column of ours.
        has: further columns that a table of this layout has.
        lacks: columns that a table of this layout does not have.
        optional: columns of ours whose column or path may be missing.
        ignore: columns and paths, also with `*`, that are neither read nor kept.
        encoding: encoding of a text file that is not in UTF-8.
        tokenizer: hub id or folder of the tokenizer that made a table's token ids.
    """

    name: str = ""
    format: str = "auto"
    columns: Columns = field(default_factory=dict)
    parse: tuple[str, ...] | None = None
    winner: Any = None
    label: float = 1.0
    where: Mapping[str, Any] = field(default_factory=dict)
    group: tuple[str, ...] = ()
    tree: Mapping[str, str] = field(default_factory=dict)
    range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    encoding: str | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, option: object) -> Layout:
        """The layout that an option gives: a name, a YAML file with one, or the mapping itself; None leaves all open.

        Raises:
            ConfigError: if there is no such layout or file, or a key of it is unknown.
        """
        if option is None or isinstance(option, Layout):
            return option or cls()
        if isinstance(option, Mapping):
            return _checked("", option)
        if (name := str(option)) in LAYOUTS:  # which loads the plug-ins for a name that it lacks
            return LAYOUTS[name]
        if (path := Path(name).expanduser()).suffix not in (".yaml", ".yml"):
            if (found := published().get(name)) is None:
                known = [*published(), *LAYOUTS]
                raise ConfigError(did_you_mean("layout", name, known) + "; or name a .yaml file of one")
            return found
        try:
            return _checked(path.stem, described(str(path.absolute())))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"the layout {path} cannot be read: {(str(error).splitlines() or [''])[0]}") from error

    @cached_property
    def named_format(self) -> RowFormat | None:
        """The row format that it names; None where the rows tell."""
        if self.format not in LAYOUTS:
            raise ConfigError(did_you_mean("data.format", self.format, LAYOUTS))
        return FORMATS.get(self.format)

    @cached_property
    def verdicts(self) -> Winner | None:
        """Meaning of the winner column; None where nothing gives it."""
        return None if self.winner is None else Winner.parse(self.winner)

    @cached_property
    def is_open(self) -> bool:
        """True if the rows tell how they are read, since it names neither a format nor columns."""
        keys = self.to_dict().keys() - {"columns", "parse", "label", "encoding", "tokenizer"}
        return not keys and not any(self.columns.values())

    @property
    def shown(self) -> str:
        """Its name with its kind, for messages."""
        return f"layout {self.name}" if self.name else f"format {self.format}"

    @cached_property
    def paths(self) -> Mapping[str, Sequence[str]]:
        """Names and paths that each of our columns is read from; its own name where it is left out."""
        return {ours: [ours] if theirs is None else paths_of(theirs) for ours, theirs in self.columns.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        """Columns that a table must have; a path may also be the name of a column."""
        read = (ours for ours, theirs in self.columns.items() if theirs is not None and ours not in self.optional)
        mapped = (path for ours in read for path in self.paths[ours])
        return frozenset({*mapped, *self.where, *self.group, *self.tree.values(), *self.has, *(self.parse or ())})

    def fits(self, row: Row) -> bool:
        """True if the row has all columns that are required, and the parts of columns."""
        return row.keys().isdisjoint(self.lacks) and all(
            name in row or (columns_at(name, row) and (name in self.where or not is_missing(cell(row, name))))
            for name in self.required
        )

    def spelled(self, row: Row) -> Row:
        """The row with lists and objects for texts in the columns that are parsed; a path parses what it leads into."""
        return row | {name: parsed(row[name]) for name in self.parse if name in row} if self.parse else row

    def in_words(self) -> str:
        """The keys by which it reads its rows, as its file has them."""
        read = {name: value for name, value in self.to_dict().items() if name not in _ACCOUNTS}
        return ", ".join(as_yaml(read)) or self.shown

    def to_dict(self) -> dict[str, Any]:
        """Its keys that are set, as its file has them."""
        values = {key: value for key in _KEYS if (value := getattr(self, key)) != getattr(_OPEN, key)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        """Pattern of columns and paths, and of all below them; of nothing where none is ignored."""
        return re.compile("|".join(f"{translate(name)}|{re.escape(name)}[.]" for name in self.ignore) or "(?!)")

    def ignores(self, name: str) -> bool:
        """True for a column or path that is neither read nor kept."""
        return self._ignored.match(name) is not None

    def ours(self, row: Row) -> Row:
        """The row under our names, without what is ignored and with lists for single messages that are responses."""
        found = renamed(row, self.columns, self.paths, self.parse or ()) if self.columns else row
        if self.ignore:
            found = {name: cell for name, cell in found.items() if name in self.columns or not self.ignores(name)}
        single = {name: [found[name]] for name in _CANDIDATES & found.keys() if is_message(found[name])}
        return found | single if single else found

    def belonging(self, row: Row) -> tuple[Row | None, str | None]:
        """The row without the answers that `where` leaves out, and the reason of these.

        An answer is an object in a list, or an item of a column with a path for name and of those beside it. The row is
        None if no answer is left.
        """
        reason = None
        for path, wanted in self.where.items():
            refused, found = isinstance(wanted, Mapping), _listed(cell(row, path))
            values = [*map(str, _listed(wanted["not"] if refused else wanted))]
            belong = [(str(value) in values) != refused for value in found]
            if not all(belong):
                reason = f"left out, since {path} is {found[belong.index(False)]}"
                beside = path.rpartition(".")[0]
                if not any(belong) or not beside:
                    return None, reason
                steps = list[str]()
                if not (columns := [name for name in row if name == beside or name.startswith(f"{beside}.")]):
                    columns, steps = [root_of(path)], beside.split(".")[1:]
                row = row | {name: _kept(row[name], steps, belong) for name in columns}
        return row, reason

    def read(self, stored: Row, names: Iterable[str]) -> Row:
        """The row under our names, unless it would be misread.

        Args:
            stored: the row as it is stored, whose columns of our names may be others than those that are read.
            names: our columns that are read.

        Raises:
            ValueError: if a number is out of range, a text cannot be parsed, or a layout with a name leaves content
                unread.
        """
        row = self.ours(stored)
        for name in self.parse or ():
            if isinstance(text := cell(stored, name, (name,)), str) and text.strip().startswith(("[", "{")):
                form = "a list or an object in JSON or as Python prints it, with each key once"
                raise ValueError(f"{name} must be {form}, got {text:.60}")
        for name, (low, high) in self.range.items():
            for value in _listed(row.get(name)):
                if not low <= read_number(name, value) <= high:
                    raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value}")
        if not self.name:
            return row
        unread = {name: value for name, value in row.items() if name not in names and not is_empty(value)}
        unread |= {name: stored[name] for name in self._overwritten if not is_empty(stored.get(name))}
        for name, value in unread.items():
            if is_undecided(name, value):
                raise ValueError(f"{name} is {value}, which layout {self.name} does not read")
        content = [name for name in unread if name.rpartition(".")[2] in _CONTENT]
        content = [name for name in content if name != "score" or "response" in row]
        known = {folded(text) for each in names for text in texts_in(row.get(each))} if content else set()
        for name in content:
            if not known.issuperset(map(folded, texts_in(unread[name]))):
                without = f"leave it out with {Spelling.current().columns({name: None})}"
                told = "rename or remove it" if name in self.columns else without
                raise ValueError(f"{name} is not read by layout {self.name} and would be lost; {told}")
        return row

    @cached_property
    def _overwritten(self) -> Sequence[str]:
        """Columns of our names that are read from other columns, and not ignored."""
        roots = {root_of(path) for paths in self.paths.values() for path in paths}
        return [name for name in self.columns if name not in roots and not self.ignores(name)]


def is_undecided(name: str, value: object) -> bool:
    """True for a cell that takes the preference of its row back, by its text or as true in a column of ties."""
    text = str(value).strip().casefold() if isinstance(value, str | bool) else ""
    return text in _UNDECIDED or (text == "true" and re.search(r"(^|[_ .-])ties?$", name.casefold()) is not None)


def as_yaml(options: Mapping[str, Any]) -> list[str]:
    """Lines of the file of a layout with these keys."""
    form = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False, "width": float("inf")}
    values = (yaml.safe_dump(value, **form).strip().removesuffix("...").strip() for value in options.values())
    return [f"{key}: {value}" for key, value in zip(options, values, strict=True)]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _kept(value: Any, steps: Sequence[str], belong: Sequence[bool]) -> Any:
    """The value with only the items that belong of the list at a path."""
    value = parsed(value)
    if steps:
        return {**value, steps[0]: _kept(value[steps[0]], steps[1:], belong)}
    return [*compress(value, belong)] if isinstance(value, list) and len(value) == len(belong) else value


_OPEN = Layout()
_KEYS = {each.name: str(each.type) for each in fields(Layout) if each.name != "name"}
"""Keys of a layout's file, with their types."""


def _checked(name: str, options: Mapping[Any, Any]) -> Layout:
    shown = f"layout {name}" if name else "a layout"
    require_options(shown, _KEYS, options)
    for key, value in options.items():
        if "TODO" in str(value):
            raise ConfigError(f"{shown}: put what the rows mean in place of TODO in {key}")
        if key == "tree" and {*value} not in ({"root"}, {"id", "parent"}):
            raise ConfigError(f"{shown}: tree must name root, or id and parent, got {value!r}")
    try:
        codecs.lookup(str(options.get("encoding", "utf-8")))
    except LookupError as error:
        raise ConfigError(f"{shown}: encoding must be one that Python knows, such as latin1, got {error}") from error
    names = {key: tuple(map(str, value)) for key, value in options.items() if _KEYS[key].startswith("tuple")}
    return Layout(name=name, **{**options, **names})


@cache
def published() -> Mapping[str, Layout]:
    """The layouts of published data sets by name, which `configs/layout` holds."""
    files = sorted((Path(config_root()) / "layout").glob("*.yaml"))
    return {path.stem: _checked(path.stem, described(f"layout/{path.name}")) for path in files}


LAYOUTS = Registry("layout", {name: Layout(format=name) for name in ("auto", *FORMATS)})
"""Layouts by the value of the option `format`: the formats, and the layouts of tables that users add."""
ALWAYS_READ = frozenset({*OPTIONAL_COLUMNS, *CONTEXT_COLUMNS})
"""Columns that are read by their own names in addition to a format's."""


def require_columns(path: str, layout: Layout, rows: Sequence[Row]) -> None:
    """Refuse rows that lack columns of a layout, or parts of columns.

    Args:
        path: the source as it was named.
        layout: layout with the options of the source.
        rows: its first rows as they are stored.

    Raises:
        DataError: naming what is lacking and the columns or parts that are there.
    """
    known = columns_of(rows)
    mapped = [(ours, path) for ours, paths in layout.paths.items() if ours not in layout.optional for path in paths]
    idle = {*(layout.parse or ())}.difference(known, *layout.paths.values())  # paths that nothing reads
    lost = sorted(name for name in layout.required if name in idle or not columns_at(name, known))
    if lost and (layout.name or not {*lost} <= {path for _, path in mapped}):
        shown, got = layout.shown if layout.name else "the layout", ", ".join(sorted(known))
        raise DataError(f"{path}: {shown} needs the columns {', '.join(lost)}, which the rows lack; got columns {got}")
    for ours, name in mapped:
        root, theirs = root_of(name), layout.columns[ours]
        if (root if theirs is None else name) in known or not all(is_missing(cell(row, name)) for row in rows):
            continue
        items = (item for row in rows for item in _listed(row.get(root)))
        parts = dict.fromkeys(str(part) for item in items if isinstance(item, Mapping) for part in item)
        told = f"the column {root} holds no such part; it has {', '.join(parts) or 'no parts'}"
        option = Spelling.current().columns({ours: theirs and name})
        raise DataError(f"{path}: {option}: {told if root in known else did_you_mean('column', name, known)}")
