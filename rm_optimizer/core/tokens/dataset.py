"""Data sets of preference pairs: loading, subsets, fingerprints, and the pairs that a model can read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.formats import READ_COLUMNS
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, conversation_groups, prompt_id
from rm_optimizer.core.pairs.source_pairs import SourcePairs, read_pairs
from rm_optimizer.core.pairs.sources import SOURCE_OPTIONS, parse_sources
from rm_optimizer.core.rows.bad_rows import PairRow, SkippedRow
from rm_optimizer.core.rows.messages import response_json
from rm_optimizer.core.rows.natural import table_rows
from rm_optimizer.core.tokens.cache import encoded_chunks, over_long_rows
from rm_optimizer.core.tokens.chat import ConversationRenderer, renderer_of
from rm_optimizer.core.tokens.tokenizer import with_texts
from rm_optimizer.errors import DataError
from rm_optimizer.records.orders import random_positions
from rm_optimizer.schema.data import DataConfig, OverLong, ReadOptions, Spelling, read_config

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("rm_optimizer")


def prompt_ids(pairs: Sequence[PreferencePair]) -> tuple[str, ...]:
    """Each pair's `prompt_id`, computed once for each different prompt."""
    known = {prompt: prompt_id(prompt) for prompt in dict.fromkeys(pair.prompt for pair in pairs)}
    return tuple(known[pair.prompt] for pair in pairs)


class TokenizedPair(PreferencePair, Mapping[str, "Tensor"]):
    """A pair that is also a mapping of its tokens, which torch's `default_collate` stacks.

    `chosen_input_ids`, `chosen_attention_mask`, `rejected_input_ids` and `rejected_attention_mask` have shape
    (max_length,), padded on the right. `margin` (0 for a pair without one), `label` and `weight` are numbers. `scores`
    are those of both responses, if the pair has them.
    """

    renderer: ConversationRenderer

    @classmethod
    def of(cls, pair: PreferencePair, renderer: ConversationRenderer) -> TokenizedPair:
        """The pair with its rendering."""
        made = cls(pair.prompt, pair.chosen, pair.rejected, pair.margin, pair.metadata, pair.label, pair.weight)
        object.__setattr__(made, "renderer", renderer)
        return made

    @cached_property
    def tokens(self) -> dict[str, Tensor]:
        """The mapping's values."""
        import torch  # takes a second

        found: dict[str, Tensor] = {}
        for side, response in (("chosen", self.chosen), ("rejected", self.rejected)):
            ids = torch.tensor(self.renderer.encode(self.prompt, response).ids)
            rest = (0, self.renderer.max_length - len(ids))
            found[f"{side}_input_ids"] = torch.nn.functional.pad(ids, rest, value=self.renderer.pad_token_id)
            found[f"{side}_attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), rest)
        numbers = {"label": self.label, "weight": self.weight, "margin": self.margin, "scores": self.scores}
        return found | {name: torch.tensor(value).float() for name, value in numbers.items() if value is not None}

    def __getitem__(self, name: str) -> Tensor:
        return self.tokens[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value."""
        return TokenizedPair.of, (PreferencePair(*super().__reduce__()[1]), self.renderer)


class PreferenceDataset(SourcePairs, Sequence[PreferencePair]):
    """An immutable sequence of preference pairs.

    With a tokenizer, pairs that `over_long` drops are left out at once, else where the pairs become tokens.

    Args:
        data: the pairs or where to read them: a path, a folder of files or written by `datasets`, a pattern, a hub name
            (`owner/name` or `owner/name:config:split`), a mapping `{path, weight, format, columns, winner, label}`, or
            a list of these, mixed by weight; a data frame, a `datasets.Dataset`, an Arrow table or a mapping of
            columns; a list or iterator of `PreferencePair`s or of rows; or another data set. Files of a folder are one
            source with its name; files of equal names are named by their paths.
        tokenizer: a tokenizer or a `BradleyTerryRM`, for items that are also mappings of their tokens.
        max_length: most tokens of a sequence; None is the model's, or what the tokenizer states, at most 1024.
        options: how rows are read, as `ReadOptions` lists them.

    Attributes:
        pairs: the pairs, in order, without tokens.
        skipped: rows of the sources that gave no pair, and why.
        rows: row of each pair; empty if they were not read from a source.
        notes: sentences on columns that look like content and were not read.
        sources: paths and names of the sources.
        renderer: rendering of the items' tokens; None without a tokenizer.

    Raises:
        DataError: if a source cannot be read or a row is bad; the text names file and row.
        ConfigError: if an option of a source is wrong.
        TypeError: if `data` or `tokenizer` is something else, or an option is unknown.

    Example:
        >>> pairs = [PreferencePair("2 + 2?", "4", "5"), PreferencePair("3 + 3?", "6", "9")]
        >>> data = PreferenceDataset(pairs)
        >>> train, val = data.split_by_prompt(0.5, seed=0)
        >>> len(train), len(val)
        (1, 1)
    """

    renderer: ConversationRenderer | None

    def __init__(
        self, data: object, tokenizer: object = None, max_length: int | None = None, **options: Unpack[ReadOptions]
    ) -> None:
        config = read_config("PreferenceDataset", options)
        if not isinstance(data, SourcePairs):
            with Spelling.python.used():
                data = _read(data, config)
            for note in data.notes:
                _log.warning(note)
        if tokenizer is None and max_length is not None:
            raise TypeError("max_length is for tokens, which need a tokenizer; give it as the second argument")
        renderer = None if tokenizer is None else renderer_of(tokenizer, max_length)
        kept = {name: value for name, value in vars(data).items() if value is not None}
        vars(self).update({"renderer": renderer, **kept})
        if "over_long" in options:
            vars(self).update({"over_long": config.over_long})
        if renderer is not None:
            vars(self).update(vars(self.fitting(renderer)))

    @staticmethod
    def joined(parts: Sequence[SourcePairs]) -> PreferenceDataset:
        """The pairs of all parts, one after another."""
        return PreferenceDataset(SourcePairs.joined(parts))

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, index: slice) -> PreferenceDataset: ...
    def __getitem__(self, index: int | slice) -> PreferencePair | PreferenceDataset:
        if isinstance(index, slice):
            return self._taken(range(len(self.pairs))[index], ())
        pair = self.pairs[index]
        return pair if self.renderer is None else TokenizedPair.of(pair, self.renderer)

    def __repr__(self) -> str:
        return f"PreferenceDataset({len(self.pairs)} pairs, {len(self.skipped)} skipped rows)"

    @cached_property
    def prompt_ids(self) -> tuple[str, ...]:
        """Each pair's `prompt_id`."""
        return prompt_ids(self.pairs)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that depend on all that training reads: texts, margins, labels, weights and order."""
        content = hashlib.sha256()
        for identity, pair in zip(self.prompt_ids, self.pairs, strict=True):
            sides = (response_json(pair.chosen), response_json(pair.rejected))
            row = [identity, *sides, pair.margin, pair.label, pair.weight, *(pair.scores or ())]
            content.update(json.dumps(row).encode())
        return content.hexdigest()[:16]

    def subset(self, num_pairs: int, seed: int) -> PreferenceDataset:
        """A random subset of `num_pairs` pairs in their order, or the data set itself if it has no more.

        With one seed, a smaller subset is part of every larger one.

        Raises:
            ValueError: if `num_pairs` is not positive.
        """
        if num_pairs < 1:
            raise ValueError(f"num_pairs must be at least 1, got {num_pairs}")
        if num_pairs >= len(self.pairs):
            return self
        kept = random_positions(len(self.pairs), num_pairs, seed)
        return self._taken(kept.tolist(), self.skipped)

    def accepted_by(self, renderer: ConversationRenderer) -> PreferenceDataset:
        """The pairs that can be rendered, and that `over_long` leaves.

        A row whose conversation is refused is treated like any other bad row.

        Raises:
            DataError: if a row is refused and bad rows stop the reading, or too many are, or no pair is left, or a
                sequence is too long and `over_long` refuses it; the text names file and row.
        """
        reasons: dict[int, str] = {}
        for position, pair in enumerate(self.pairs):
            if (reason := renderer.refusal(pair)) is not None:
                reasons[position] = reason
                if not self.rows:
                    raise DataError(f"pair {position + 1}: {reason}")
                if self.rows[position].tally.stops:
                    break
        if not reasons:
            return self.fitting(renderer)
        dropped = _refused(self.rows, reasons.items())
        if len(reasons) == len(self.pairs):
            raise DataError(f"none of {len(reasons)} pairs can be rendered; the first: {dropped[0]}")
        return self._without(reasons, dropped).fitting(renderer)

    def fitting(
        self, renderer: ConversationRenderer, num_cut: NDArray[np.integer[Any]] | None = None
    ) -> PreferenceDataset:
        """The pairs that `over_long` leaves: those without a sequence that is too long, if such pairs are dropped.

        Args:
            renderer: renderer of the token ids, with the limit.
            num_cut: tokens that truncation cuts from both sequences of each pair, if they are known.

        Raises:
            DataError: if `over_long` refuses a pair, or no pair is left; the text names file and row.
        """
        if self.over_long == OverLong.truncate or not self.pairs:
            return self
        if num_cut is None:
            num_cut = np.concatenate([chunk.cuts.sum(axis=2) for chunk in encoded_chunks(self.pairs, renderer)])
        dropped = over_long_rows(num_cut, self.rows, renderer.max_length, self.over_long)
        if not dropped:
            return self
        if len(dropped) == len(self.pairs):
            raise DataError(f"none of {len(dropped)} pairs is left by over_long=drop; the first: {dropped[0]}")
        _log.info(
            "%d of %d pairs are left out: a sequence has more than max_length=%d tokens",
            *(len(dropped), len(self.pairs), renderer.max_length),
        )
        return self._without(dropped, dict.fromkeys(dropped.values()))

    def _without(self, positions: Container[int], rows: Iterable[SkippedRow]) -> PreferenceDataset:
        kept = [position for position in range(len(self.pairs)) if position not in positions]
        return self._taken(kept, (*self.skipped, *rows))

    def _taken(self, positions: Iterable[int], skipped: tuple[SkippedRow, ...]) -> PreferenceDataset:
        taken = PreferenceDataset(self.take(positions, skipped))
        vars(taken).update({"renderer": self.renderer})  # whose limit was applied before
        return taken

    def split_by_prompt(self, fraction: float, seed: int) -> tuple[PreferenceDataset, PreferenceDataset]:
        """Two data sets without a common conversation; the second has about `fraction` of the prompts, at least one.

        Prompts of which one continues the other, or that differ in case and blanks only, stay together. Which prompts
        are held out depends on the seed and on the set of prompts, not on the order of the rows.

        Args:
            fraction: share of prompts to hold out, in (0, 1).
            seed: seed of the choice.

        Raises:
            ValueError: if the fraction lies outside (0, 1).
            DataError: if there are fewer than two conversations.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie in (0, 1), got {fraction}")
        prompt_of = distinct_prompts(self)
        order = sorted(prompt_of, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
        members: dict[int, list[str]] = {}
        for identity, group in zip(order, conversation_groups([prompt_of[name] for name in order]), strict=True):
            members.setdefault(group, []).append(identity)
        if len(members) < 2:
            raise DataError(
                f"splitting validation off by prompt needs at least 2 different prompts, got {len(members)}; prompts "
                "of one conversation count once; give more training data, or validation data as data.val"
            )
        wanted = min(max(1, round(fraction * len(order))), len(order) - 1)
        held_out: set[str] = set()
        for names in members.values():
            if len(held_out) + len(names) <= wanted:
                held_out.update(names)
        smallest: list[str] = min(members.values(), key=len)
        held_out = held_out or set(smallest)
        sides: tuple[list[int], list[int]] = ([], [])
        for position, identity in enumerate(self.prompt_ids):
            sides[identity in held_out].append(position)
        return self._taken(sides[0], self.skipped), self._taken(sides[1], ())


def _read(data: Any, options: DataConfig) -> SourcePairs:
    """Pairs of files that `data` names, or of its rows."""
    if isinstance(data, Iterator):
        data = list(data)
    if names_files(data):
        return read_pairs([*map(with_texts, parse_sources(data, options))], options)
    rows = table_rows("data", data)
    kind = PreferencePair if rows and isinstance(rows[0], PreferencePair) else Mapping
    for place, row in enumerate(rows):
        if not isinstance(row, kind):
            raise TypeError(
                f"data[{place}] must be a PreferencePair or a row with prompt, chosen and rejected, got "
                f"{type(row).__name__}"
            )
    if kind is PreferencePair or not rows:
        return SourcePairs(tuple(rows))
    (source,) = parse_sources("pairs", options)
    return replace(read_pairs([with_texts(replace(source, rows=rows))], options), sources=())


def names_files(data: object) -> bool:
    """True for a path or name, a mapping with one that is no row with such a column, and a list that begins so."""
    first = data[0] if isinstance(data, list | tuple) and data else data
    is_row = isinstance(first, Mapping) and ("path" not in first or first.keys() & (READ_COLUMNS - {*SOURCE_OPTIONS}))
    return isinstance(first, str | os.PathLike | Mapping) and not is_row


def distinct_prompts(data: PreferenceDataset) -> dict[str, Prompt]:
    """The different prompts of a data set by their `prompt_id`, in order."""
    return {identity: pair.prompt for identity, pair in zip(data.prompt_ids, data.pairs, strict=True)}


def load_pairs(source: object, config: DataConfig) -> PreferenceDataset:
    """Pairs of a source or in memory, read with the options of `config`; its `train` and `val` are not used.

    Raises:
        DataError: if the source cannot be read or a row is bad; the text names file and row.
        ConfigError: if an option of a source is wrong.
        TypeError: if it is neither a source nor pairs.
    """
    return PreferenceDataset(_read(source, config), over_long=config.over_long)


def _refused(rows: Sequence[PairRow], reasons: Iterable[tuple[int, str]]) -> list[SkippedRow]:
    """Treat rows as bad by the positions of their pairs and the reasons, and return each once.

    Args:
        rows: row of each pair.
        reasons: position and reason of each bad pair.

    Raises:
        DataError: if bad rows stop the reading of their source, or too many of its rows are bad.
    """
    first: dict[PairRow, str] = {}
    for position, reason in reasons:
        first.setdefault(rows[position], reason)
    refused = {row: row.tally.refuse(row.number, reason) for row, reason in first.items()}
    for tally in dict.fromkeys(row.tally for row in refused):
        tally.require_few_bad([row.number for row in rows if row.tally is tally])
        tally.require_few_bad()
    return list(refused.values())
