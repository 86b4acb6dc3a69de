"""Suites of evaluation, which YAML files describe.

A suite has sets of rows, rules of their scores, and trees of averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from rm_optimizer.core.pairs.layouts import Layout
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, digest, prompt_id
from rm_optimizer.core.pairs.source_format import ComparedRow, SourceFormat
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.bad_rows import RowTally
from rm_optimizer.core.rows.readers import row_unit, source_files
from rm_optimizer.errors import ConfigError, DataError, did_you_mean, require_known
from rm_optimizer.evaluation.list_rules import RULES, Credit, Rewards, SuiteItem, Tie
from rm_optimizer.records.codec import from_values
from rm_optimizer.schema.checks import require_options
from rm_optimizer.schema.composition import config_root
from rm_optimizer.schema.data import DataConfig, KwiseRule


@dataclass(frozen=True, kw_only=True)
class SuiteSet:
    """Rows of a suite that are read and scored in the same way.

    Args:
        path: file, folder or hub name, or several; a web address or nothing for a set that only `--data` gives.
        rows: number of rows of the published set; 0 if it is unknown.
        layout: how rows are read, as the option `layout` has it.
        local: layout of a local copy, if it differs from the public set's.
        rule: rule of the score, a name of `RULES`.
        rules: other rules by group.
        tie: credit for equal rewards.
        group: columns whose values, joined by "/", are a row's group; empty takes the set's name. Of names with "|"
            between them, the first that the row has counts.
        groups: pattern of the group's name by the name to take for it.
        optional: True for a set that only `--data` adds.
    """

    path: str | tuple[str, ...] = ""
    rows: int = 0
    layout: Any = None
    local: Any = None
    rule: str = "pairs"
    rules: Mapping[str, str] = field(default_factory=dict)
    tie: Tie = Tie.wrong
    group: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        for rule in (self.rule, *self.rules.values()):
            require_known("rule of a suite", rule, sorted(RULES))

    def group_of(self, name: str, row: ComparedRow) -> str:
        """Group of a row of the set of that name.

        Raises:
            ValueError: if the row lacks the column.
        """
        values = [[row.metadata[each] for each in column.split("|") if each in row.metadata] for column in self.group]
        if [] in values:
            raise ValueError(f"the column {self.group[values.index([])]}, which holds the group, is missing")
        group = "/".join(str(found[0]) for found in values) or name
        return next((joined for joined, pattern in self.groups.items() if fnmatchcase(group, str(pattern))), group)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Benchmark with the rule of its official score.

    Args:
        name: name of its file.
        source: rule and version that it follows.
        protocol: what else the official numbers depend on.
        sets: its rows.
        score: the average that is its official number.
        average: averages by name, in the order of their computation: `mean` of parts with equal or fixed weights,
            `pool` of groups by their credits, or `sum` with weights. Parts without rows are left out.
        per: values of the first column of `group` with separate averages; the score is the mean over them.
    """

    name: str
    source: str
    protocol: str = ""
    sets: Mapping[str, SuiteSet]
    score: str
    average: Mapping[str, Mapping[Literal["mean", "pool", "sum"], Any]] = field(default_factory=dict)
    per: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own, before = self.average, set[str]()
        for name, average in own.items():
            parts = self.parts_of(name) if len(average) == 1 else {}
            are_weights = all(type(each) in (int, float) and 0 < each < float("inf") for each in parts.values())
            is_later = bool(parts.keys() & (own.keys() - before))
            if [*average] not in (["mean"], ["pool"], ["sum"]) or not parts or not are_weights or is_later:
                told = "one of mean, pool and sum, of groups and of averages above it, with positive weights"
                raise ConfigError(f"suite {self.name}: average {name} must be {told}; got {average}")
            before.add(name)
        if self.per and self.score not in own:
            raise ConfigError(f"suite {self.name}: per needs a score among its averages, got {self.score}")
        if self.per:
            found: dict[str, Any] = {
                f"{value}/{name}": {kind: {f"{value}/{part}": weight for part, weight in self.parts_of(name).items()}}
                for value, (name, (kind,)) in product(self.per, own.items())
            }
            found[self.score] = {"mean": [f"{value}/{self.score}" for value in self.per]}
            object.__setattr__(self, "average", found)
            object.__setattr__(self, "per", ())

    @classmethod
    def of(cls, name: str) -> Suite:
        """The suite of that name, or of a YAML file.

        Raises:
            ConfigError: if there is no such suite, or the file is no suite.
        """
        path, known = Path(name).expanduser(), published_suites()
        if path.suffix not in (".yaml", ".yml"):
            if name not in known:
                raise ConfigError(f"{did_you_mean('suite', name, sorted(known))}; or name a .yaml file of one")
            path = known[name]
        try:
            return cls.from_values({"name": path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))})
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: the suite cannot be read: {' '.join(str(error).split())}") from error

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Suite:
        """The suite that a mapping describes.

        Raises:
            ConfigError: if an option is unknown or has another type.
            TypeError: if an option is missing.
        """
        require_options(shown := f"suite {values.get('name')}", cls.__annotations__, values)
        for name, each in values.get("sets", {}).items():
            require_options(f"{shown}: set {name}", SuiteSet.__annotations__, each)
        return from_values(cls, values)

    def parts_of(self, average: str) -> dict[str, float]:
        """Parts of an average with their weights."""
        (parts,) = self.average[average].values()
        listed = [parts] if isinstance(parts, str) else parts
        return {**listed} if isinstance(listed, Mapping) else dict.fromkeys(listed, 1.0)

    def leaves_of(self, name: str) -> list[str]:
        """Names of the groups below an average, or a group itself."""
        if name not in self.average:
            return [name]
        return [*dict.fromkeys(chain.from_iterable(map(self.leaves_of, self.parts_of(name))))]

    def weights(self, name: str, counts: Mapping[str, int]) -> dict[str, float]:
        """Weight of the mean credit of each group in a score.

        Empty if the score has no credits.

        Args:
            name: a group or an average.
            counts: number of credits of each group that has some.
        """
        if name not in self.average:
            return {name: 1.0} if name in counts else {}
        (kind,), found = self.average[name], dict[str, float]()
        parts = [(weight, self.weights(part, counts)) for part, weight in self.parts_of(name).items()]
        if kind == "pool":
            parts = [(sum(map(counts.__getitem__, inner)), inner) for _, inner in parts]
        total = 1.0 if kind == "sum" else sum(weight for weight, inner in parts if inner)
        for weight, inner in parts:
            found |= {leaf: found.get(leaf, 0.0) + weight / total * share for leaf, share in inner.items()}
        return found


def published_suites() -> dict[str, Path]:
    """Files of the suites in `configs/suite`, by name."""
    return {path.stem: path for path in sorted((Path(config_root()) / "suite").glob("*.yaml"))}


def sources_by_suite(option: Any) -> dict[str, list[str]]:
    """Local copies by suite, as `read_suite` takes them.

    The option is as `{rmbench: a.json, hhh: {honest: b.json}}`.

    Raises:
        ConfigError: if it is no name, list of names or mapping to files.
    """
    listed = option if isinstance(option, Mapping | list) else [option]
    names = listed if isinstance(listed, Mapping) else dict.fromkeys(map(str, listed))
    found: dict[str, list[str]] = {}
    for name, files in names.items():
        given = {} if files is None else files if isinstance(files, Mapping) else {"": files}
        if not all(isinstance(file, str) and file for file in given.values()):
            raise ConfigError(f"training.suites must be names, or name a file for each set, got {files!r} for {name}")
        found[str(name)] = [f"{part}={file}" if part else file for part, file in given.items()]
    return found


@dataclass(frozen=True)
class SuiteItems:
    """Rows of a suite, read for scoring.

    Args:
        suite: the suite.
        items: the rows.
        notes: sentences on rows that differ from the published sets.
    """

    suite: Suite
    items: tuple[SuiteItem, ...]
    notes: tuple[str, ...]

    @cached_property
    def responses(self) -> dict[tuple[str, str], Prompt]:
        """Prompt of each different response, by prompt identity and text."""
        return {(item.prompt_id, text): item.prompt for item in self.items for text in item.responses.values()}

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the rows."""
        return digest([[item.group, item.prompt_id, [*item.responses.items()], item.edges] for item in self.items])

    def credits(self, reward_of: Callable[[tuple[str, str]], float]) -> list[Credit]:
        """Credits of the rows, in an order that rewards do not change.

        Args:
            reward_of: function from a key of `responses` to its reward.

        Raises:
            DataError: if a row lacks what its rule needs.
        """
        by_rule: dict[str, list[tuple[SuiteItem, Rewards]]] = {}
        for item in self.items:
            rewards = {place: reward_of((item.prompt_id, text)) for place, text in item.responses.items()}
            by_rule.setdefault(item.rule, []).append((item, rewards))
        return [credit for name, rows in by_rule.items() for credit in RULES[name](rows)]


def read_suite(suite: Suite, sources: Sequence[str], options: DataConfig) -> SuiteItems:
    """Read the rows of a suite.

    Args:
        suite: the suite.
        sources: local copies as `SET=FILE`, or as `FILE` of the only set that is not optional; with any, other sets are
            left out. Empty reads the public sets.
        options: treatment of bad rows.

    Raises:
        ConfigError: if a source names no set of the suite.
        DataError: if a set cannot be read or a row is bad.
    """
    given: dict[str, list[str]] = {}
    whole = [name for name, each in suite.sets.items() if not each.optional]
    for source in sources:
        name, _, path = source.partition("=")
        if name not in suite.sets:
            if len(whole) != 1:
                raise ConfigError(f"--data must be SET=FILE, with SET one of {', '.join(suite.sets)}; got '{source}'")
            name, path = whole[0], source
        given.setdefault(name, []).append(path)
    items, notes = list[SuiteItem | None](), list[str]()
    for name, each in suite.sets.items():
        if (name not in given) if given else each.optional:
            notes += [f"incomplete: set {name} is left out"] if given and not each.optional else []
            continue
        paths = given.get(name, [each.path] if isinstance(each.path, str) else each.path)
        if missing := [path for path in paths if not path or path.startswith("https://")]:
            there = f", from {missing[0]}" if missing[0] else ""
            raise ConfigError(f"suite {suite.name}: set {name} is not on the hub; give --data {name}=FILE{there}")
        if name in given and each.local is not None:
            each = replace(each, layout=each.local)
        found = [item for path in paths for item in _items(each, name, path, options, notes)]
        if each.rows and len(found) != each.rows:
            notes.append(f"incomplete: {len(found):,} of {each.rows:,} rows of set {name}")
        items += found
    if not (decided := tuple(item for item in items if item is not None)):
        raise DataError(f"suite {suite.name}: no row of {', '.join(given) or 'its sets'} states a preference")
    num_undecided = len(items) - len(decided)
    num_blank = sum(not text.strip() for item in decided for text in item.responses.values())
    notes += [f"{num_undecided:,} rows state no preference and do not count"] if num_undecided else []
    notes += [f"{num_blank:,} responses are blank and are scored as such"] if num_blank else []
    read = SuiteItems(suite, decided, ())
    groups = {credit.group: 1 for credit in read.credits(lambda key: 0.0)}  # which refuses rows unfit for a rule
    leaves = suite.leaves_of(suite.score)
    if not suite.weights(suite.score, groups):
        if not given:
            both = (", ".join([*names][:5]) for names in (leaves, groups))
            raise DataError(
                "suite {}: {} needs rows of {}; there are rows of {}".format(suite.name, suite.score, *both)
            )
        score = next(name for name in (*suite.average, *groups) if suite.weights(name, groups))
        notes.append(f"incomplete: there are no rows of {suite.score}; the tables are by {score}")
        read = replace(read, suite=replace(suite, score=score))
    elif missing := [leaf for leaf in leaves if leaf not in groups]:
        notes.append(f"incomplete: the score lacks {', '.join(missing[:5])}{', …' * (len(missing) > 5)}")
    return replace(read, notes=tuple(notes))


def _items(each: SuiteSet, name: str, path: str, options: DataConfig, notes: list[str]) -> Iterator[SuiteItem | None]:
    """Rows of a file or set; None without a stated preference."""
    for file in chain.from_iterable(part.files for part in source_files(path)):
        source, tally = DataSource(file, Layout.of(each.layout)), RowTally(file, options)
        form, rows = SourceFormat.opened(source, tally)
        for number, row in form.compared(rows, KwiseRule.all_and_ties, tally):
            try:
                yield _item(each, row, f"{file}, {row_unit(file)} {number}", each.group_of(name, row), form)
            except ValueError as error:
                tally.report(number, str(error))
        tally.require_few_bad()
        notes += form.notes
        notes += [f"{num:,} bad rows of {file} are not scored: {cause}" for cause, num in tally.causes().items()]


def _item(each: SuiteSet, row: ComparedRow, where: str, group: str, form: SourceFormat) -> SuiteItem | None:
    """The row for its rule; None without a decided comparison.

    Raises:
        ValueError: if its prompt or a response cannot be used.
    """
    edges, responses = list[tuple[int, int]](), dict[int, str]()
    num_chosen = 1 + max((item.extra.get("chosen_index", 0) for item in row.comparisons), default=0)
    for item in row.comparisons:
        better, worse = int(item.extra.get("chosen_index", 0)), int(item.extra.get("rejected_index", 1))
        if form.form.name == "lists":
            worse += num_chosen
        responses |= {better: item.chosen, worse: item.rejected}
        if (label := item.label or 0.0) != 0.5:
            edges.append((better, worse) if label > 0.5 else (worse, better))
    if not edges:
        return None
    first, rule = row.comparisons[0], each.rules.get(group, each.rule)
    prompt = first.prompt
    texts = [(responses[better], responses[worse]) for better, worse in edges]
    pairs = tuple(PreferencePair(prompt, a, b) for a, b in texts if a != b and a.strip() and b.strip())
    own = (tuple(edges), pairs, first.is_second, group, rule, each.tie, row.metadata)
    return SuiteItem(where, prompt, prompt_id(prompt), dict(sorted(responses.items())), *own)
