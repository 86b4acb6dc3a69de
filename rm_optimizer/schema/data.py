"""The options of the sources of preference pairs and of their reading."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

from rm_optimizer.errors import require_known
from rm_optimizer.schema.checks import Options, needing, require, within


class OnBadRow(StrEnum):
    """Treatment of a row that is not a preference pair."""

    error = "error"
    drop = "drop"


class OverLong(StrEnum):
    """Treatment of a pair with a sequence of more tokens than the length limit: cut, left out, or refused."""

    truncate = "truncate"
    drop = "drop"
    refuse = "refuse"


class Thinking(StrEnum):
    """Handling of an answer's thinking.

    `keep` shows it, also where the chat template drops it; `strip` takes it out of every turn, `strip_earlier` out of
    all but the last; `refuse` shows what the template shows, and refuses rows of which it would drop thinking.
    """

    keep = "keep"
    strip = "strip"  # type: ignore[assignment]  # hides `str.strip`, which nobody calls here
    strip_earlier = "strip_earlier"
    refuse = "refuse"


class SpecialTokens(StrEnum):
    """Handling of control tokens inside contents: refused, read as plain text, or kept as the tokens they spell."""

    refuse = "refuse"
    as_text = "as_text"
    keep = "keep"


class Streaming(StrEnum):
    """Storage of the training pairs: `off` is memory, `ray` reads them from files as they are needed."""

    off = "off"
    ray = "ray"


class KwiseRule(StrEnum):
    """Pairs that a row of many scored responses gives."""

    all = "all"
    all_and_ties = "all_and_ties"
    best_worst = "best_worst"
    adjacent = "adjacent"


class Spelling(StrEnum):
    """Entrance whose options messages name: Hydra's, the flags of a command, or the arguments of a Python call."""

    hydra = "hydra"
    flags = "flags"
    python = "python"

    @classmethod
    def current(cls) -> Spelling:
        """Entrance whose block of `used` runs now; Hydra's outside of all."""
        return _current.get()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Word the options in messages of the block as the user of this entrance types them."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    def option(self, name: str, value: str) -> str:
        """An option of reading data as the user types it.

        Example:
            >>> Spelling.flags.option("on_bad_row", "drop"), Spelling.hydra.option("on_bad_row", "drop")
            ('--on-bad-row drop', 'data.on_bad_row=drop')
        """
        if self == Spelling.hydra:
            return _shell_word(f"data.{name}={value}")
        word = _shell_word(value) if self == Spelling.flags else value
        return ("{} {}" if self == Spelling.flags else '{}="{}"').format(self.name_of(name), word)

    def name_of(self, option: str) -> str:
        """Name of an option of reading data as the user types it, such as `data.on_bad_row` or `--on-bad-row`."""
        return {"hydra": f"data.{option}", "flags": f"--{option.replace('_', '-')}"}.get(self.value, option)

    def columns(self, mapping: Mapping[str, str | list[str] | None]) -> str:
        """A column mapping, our name to the file's or to several, as the user types it; None leaves a column out.

        Example:
            >>> Spelling.flags.columns({"prompt": "question", "chosen": "better"})
            '--columns prompt=question --columns chosen=better'
        """
        word = _hydra_word if self == Spelling.hydra else str
        written = {
            ours: f"[{', '.join(map(word, theirs))}]" if isinstance(theirs, list) else word(theirs or "null")
            for ours, theirs in mapping.items()
        }
        if self == Spelling.flags:
            return " ".join(f"--columns {_shell_word(f'{ours}={theirs}')}" for ours, theirs in written.items())
        if self == Spelling.python:
            return f"columns={dict(mapping)}"
        inside = ", ".join(f"{ours}: {theirs}" for ours, theirs in written.items())
        return _shell_word(f"data.columns={{{inside}}}")

    def parse(self, names: Sequence[str]) -> str:
        """A layout with the columns whose text is parsed, as the user types it.

        Example:
            >>> Spelling.flags.parse(["prompt"])
            "--layout '{parse: [prompt]}'"
        """
        if self == Spelling.python:
            return f"layout={{'parse': {[*names]}}}"
        return self.option("layout", f"{{parse: [{', '.join(map(_hydra_word, names))}]}}")

    def winner(self, values: Sequence[str | list[str]]) -> str:
        r"""Values of the winner column for the first response, the second and ties, as the user types them.

        Example:
            >>> Spelling.hydra.winner(["A", "B", ["tie", "tie (bothbad)"]])
            '\'data.winner=[A,B,"tie|tie (bothbad)"]\''
        """
        same = ["|".join(value) if isinstance(value, list) else value for value in values]
        return self.option(
            "winner", f"[{','.join(map(_hydra_word, same))}]" if self == Spelling.hydra else ",".join(same)
        )


def _hydra_word(text: str) -> str:
    """The text as a value in a list or mapping of Hydra, in quotes only where its grammar needs them."""
    return text if re.fullmatch(r"[\w.*|:/+-]+( [\w.*|:/+-]+)*", text) else json.dumps(text, ensure_ascii=False)


_current = ContextVar("entrance", default=Spelling.hydra)


def _shell_word(text: str) -> str:
    """The text as one word of a shell, in quotes only where a character of it needs them."""
    return shlex.quote(text) if re.search(r"[\s'\"\\$`&|;<>()*?\[\]{}!#~]", text) else text


OWN_MARGINS = "margin"
"""Value of `data.curriculum` that takes the pairs' own margins."""
MAX_BAD_SHARE = 0.2
"""Share of a source's rows that may be dropped as bad unless an option says otherwise."""


@dataclass(kw_only=True)
class SyntheticConfig(Options, group="data.synthetic"):
    """The embedded preference world, used when `data.train` is null."""

    num_train: int = within("[2, inf)", 6000)
    """Training pairs."""
    num_val: int = within("[2, inf)", 1000)
    """Validation pairs, on prompts that training never sees."""
    noise: float = within("[0, inf)", 1.0)
    """Temperature of the labels, which are Bernoulli(sigmoid(gold margin / noise)); 0 labels without error."""
    seed: int = within("[0, 2**32)", 0)
    """Seed of the world's texts and labels, apart from the run's own seed."""


@dataclass(kw_only=True)
class DataConfig(Options, group="data"):
    """Sources of pairs, and options for reading their rows."""

    train: Any = None
    """A path, a `datasets` name, a list or {name: path}; each may be {path, weight, format, …}. Null: synthetic."""
    val: Any = None
    """Validation pairs, in the same forms; null holds out `val_fraction` of the training prompts."""
    val_fraction: float = within("(0, 1)", 0.1, needs="train,!val")
    """Share of training prompts held out when `val` is null."""
    split_seed: int = within("[0, 2**32)", 0)
    """Seed of that split and of `max_pairs`."""
    format: str = "auto"
    """Row format: auto, explicit, hh, messages, lists, winner or kwise."""
    columns: Any = None
    """Column mapping, our name to the file's, or a path such as answer.text: {prompt: question}; null reads none."""
    winner: Any = None
    """Values of the `winner` column for response_a, response_b and a tie, or what it holds: votes, strength:-3,3."""
    layout: Any = None
    """Layout of the rows: the name of a published one, a YAML file, or the mapping; null recognizes published ones."""
    kwise_rule: KwiseRule = KwiseRule.all
    """Pairs that a k-wise row gives; equal scores make a pair, a tie, only with `all_and_ties`."""
    on_bad_row: OnBadRow = OnBadRow.error
    """Stop at the first bad row, or drop bad rows, count them and list them."""
    max_bad_share: float = within("[0, 1]", MAX_BAD_SHARE, needs="on_bad_row=drop")
    """Most rows that `on_bad_row=drop` may drop, as a share of a source's rows; more end the run with the reasons."""
    over_long: OverLong = OverLong.truncate
    """Pairs with a sequence above the length limit: truncate it, drop the pair, or refuse and name its row."""
    thinking: Thinking | None = None
    """Thinking of answers: keep, strip, strip_earlier or refuse what the template drops; null: as the base model."""
    special_tokens: SpecialTokens | None = None
    """Control tokens inside contents: refuse, as_text (they forge no turn) or keep; null: as_text for a new head."""
    allow_prompt_overlap: bool = False
    """Permit prompts that are in both training and validation."""
    max_pairs: int | None = within("[1, inf)", None)
    """Train on a random subset of this many pairs."""
    num_workers: int = within("[0, inf)", 0)
    """Data-loader processes."""
    fetch_timeout: float = within("(0, inf)", 60.0)
    """Seconds a data-loader process may take for one batch before the run stops and names it."""
    cache_dir: str | None = None
    """Folder of tokenized data; null takes the user's cache folder."""
    streaming: Streaming = Streaming.off
    """`ray` streams `train` from Parquet and JSON Lines files larger than memory; `num_workers=0` takes all cores."""
    streaming_store_mb: int = needing("streaming=ray", 256)
    """Memory of Ray's object store, in MB."""
    curriculum: str | None = None
    """Easy pairs first, by the pairs' margins (`margin`), those in a .jsonl file or by a saved model; null shuffles."""
    curriculum_easy: float = within("[0, inf)", 0.7, needs="curriculum")
    """Margin above which a pair is easy."""
    curriculum_hard: float = within("[0, inf)", 0.2, needs="curriculum")
    """Margin below which a pair is hard."""
    curriculum_quantiles: bool = needing("curriculum", False)
    """Both thresholds are shares of the pairs in place of margins."""
    curriculum_covers: bool = needing("curriculum", True)
    """Show every pair once in each epoch; false repeats pairs of a small bin and leaves out others."""
    synthetic: SyntheticConfig = needing("!train", SyntheticConfig)
    """The embedded world's size and noise."""

    def _check(self) -> None:
        mapped = self.columns is None or isinstance(self.columns, Mapping)
        require(mapped, "data.columns", "map our columns to the file's, as {prompt: question}", self.columns)
        for name in ("train", "val"):
            setattr(self, name, _listed(getattr(self, name)))
        if self.curriculum is not None:
            self._require_thresholds()
        least = self.streaming_store_mb >= 80
        require(least, "data.streaming_store_mb", "be at least 80, as Ray demands", self.streaming_store_mb)

    def _require_thresholds(self) -> None:
        in_memory = self.streaming == Streaming.off
        require(in_memory, "data.curriculum", "be null with data.streaming, which never has all pairs", self.curriculum)
        low, high = self.curriculum_hard, self.curriculum_easy
        expected = "not exceed data.curriculum_easy" + (", both in [0, 1]" if self.curriculum_quantiles else "")
        is_share = not self.curriculum_quantiles or high <= 1
        require(low <= high and is_share, "data.curriculum_hard", expected, f"{low} and {high}")


def _listed(source: Any) -> Any:
    """Sources as they are given; named ones, as `{hh: a.jsonl}`, as a list of sources with a `name`."""
    if not isinstance(source, Mapping) or not source or "path" in source:
        return source
    given = {name: item if isinstance(item, Mapping) else {"path": item} for name, item in source.items()}
    return [{**item, "name": str(name)} for name, item in given.items()]


class ReadOptions(TypedDict, total=False):
    """Options for reading rows of preference pairs, as keywords of a Python call.

    Args:
        format: row format, as `data.format` takes it, of sources that do not name their own.
        columns: column mapping, our name to the file's, of sources that do not bring their own; None as the file's name
            leaves the column out.
        winner: values of the winner column that name response_a, response_b and, if any, a tie; or what it holds.
        layout: name of a published layout, a YAML file with one, or the mapping, of sources without their own.
        kwise_rule: pairs that a k-wise row gives: all, all_and_ties, best_worst or adjacent.
        on_bad_row: "error" stops at the first bad row, "drop" leaves bad rows out and lists them in `skipped`.
        max_bad_share: most bad rows that may be dropped, as a share of a source's rows.
        over_long: treatment of pairs with a sequence above the length limit, where pairs become tokens: "truncate",
            "drop" (they are listed in `skipped`) or "refuse".
        seed: seed of the random part that a fractional weight takes.
    """

    format: str
    columns: Mapping[str, Any] | None
    winner: object
    layout: object
    kwise_rule: str
    on_bad_row: str
    max_bad_share: float
    over_long: str
    seed: int


def read_config(call: str, options: ReadOptions, entrance: Spelling = Spelling.python) -> DataConfig:
    """Data options of a run from keywords, refused by the names that the user typed.

    Args:
        call: name of the call that they are keywords of.
        options: the options.
        entrance: form in which the user typed them.

    Raises:
        TypeError: if an option is unknown.
        ConfigError: if a value is unknown or out of its range.
    """
    known, values = [*ReadOptions.__annotations__], dict[str, Any](options)
    for name in values:
        require_known(f"argument of {call}", name, known, TypeError)
    for name, kind in (("kwise_rule", KwiseRule), ("on_bad_row", OnBadRow), ("over_long", OverLong)):
        if (value := values.get(name)) is not None:
            require_known(entrance.name_of(name), str(value), [*kind])
            values[name] = kind(value)
    if "seed" in values:
        values["split_seed"] = values.pop("seed")
    return DataConfig(**values)
