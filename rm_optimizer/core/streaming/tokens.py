"""Tokenized pairs of a stream in flat arrays, which travel between processes without a copy of each pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.conversations import folded_prompt_id
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.row_pairs import numbered_pairs
from rm_optimizer.core.pairs.trained_pairs import pair_fingerprints
from rm_optimizer.core.rows.bad_rows import RowTally, SkippedRow
from rm_optimizer.core.rows.columns import renamed
from rm_optimizer.core.streaming.blocks import Block, StreamFile
from rm_optimizer.core.tokens.batching import PairValues
from rm_optimizer.core.tokens.chat import ConversationRenderer, Encoding
from rm_optimizer.errors import ConversationRefused, DataError
from rm_optimizer.schema.data import MAX_BAD_SHARE, KwiseRule, OnBadRow, Spelling


@dataclass(frozen=True, eq=False)
class PairArrays:
    """Token ids and numbers of pairs.

    Args:
        tokens: ids of all sequences, chosen and rejected in turn.
        lengths: tokens of the chosen and the rejected sequence, shape (pairs, 2).
        pair_index: row of the stream that each pair comes from, counted from 0.
        values: margins, labels and weights.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    pair_index: NDArray[np.int64]
    values: PairValues

    def __len__(self) -> int:
        return len(self.pair_index)

    def chosen(self, i: int) -> NDArray[np.int32]:
        """Token ids of the preferred sequence of pair i."""
        return self._sequence(2 * i)

    def rejected(self, i: int) -> NDArray[np.int32]:
        """Token ids of the other sequence of pair i."""
        return self._sequence(2 * i + 1)

    def take(self, positions: NDArray[np.int64]) -> PairArrays:
        """The pairs at these positions, copied."""
        sides = [side(i) for i in positions.tolist() for side in (self.chosen, self.rejected)]
        values = (column[positions] for column in vars(self.values).values())
        return PairArrays(_joined(sides), self.lengths[positions], self.pair_index[positions], PairValues(*values))

    @classmethod
    def concatenate(cls, parts: Sequence[PairArrays]) -> PairArrays:
        """The pairs of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part.values).values() for part in parts), strict=True)
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.pair_index for part in parts]),
            PairValues(*map(np.concatenate, columns)),
        )

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def _sequence(self, i: int) -> NDArray[np.int32]:
        return self.tokens[self._offsets[i] : self._offsets[i + 1]]


def _joined(sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class BlockTokens:
    """Tokens and counts of a block.

    Args:
        pairs: its pairs in the order of its rows, those identical after cutting left out.
        lengths: tokens of both sequences of every pair before cutting, shape (all pairs, 2).
        cuts: tokens cut from prompt and response of both, shape (all pairs, 2, 2).
        rows: its rows that were read, that are bad and that gave no pair.
        fingerprints: `pair_fingerprints` of its pairs, shape (all pairs, 2).
    """

    pairs: PairArrays
    lengths: NDArray[np.int64]
    cuts: NDArray[np.int32]
    rows: RowTally
    fingerprints: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class BlockReader:
    """Turns blocks into pairs.

    Args:
        files: the stream's files.
        kwise_rule: pairs that a row of many scored responses gives.
        on_bad_row: stop at a bad row, or leave it out and list it.
        max_bad_share: most bad rows of a file, as a share of its rows.
        held_out_prompts: `folded_prompt_id`s that the stream must not hold.
    """

    files: tuple[StreamFile, ...]
    kwise_rule: KwiseRule
    on_bad_row: OnBadRow
    max_bad_share: float = MAX_BAD_SHARE
    held_out_prompts: frozenset[str] = frozenset()

    def tally(self, file: int) -> RowTally:
        """A count of the rows of a file that is still empty."""
        return RowTally(self.files[file].source.path, self.on_bad_row, Spelling.hydra, self.max_bad_share)

    def pairs(self, block: Block, tally: RowTally) -> Iterator[tuple[int, PreferencePair]]:
        """The block's pairs, each with the number of its row in the file.

        Raises:
            DataError: if a row is bad and that is not to be passed over, or its prompt is held out.
        """
        file = self.files[block.file]
        stored = tally.counted(file.rows(block.part, tally.report_unread))
        rows = renamed(stored, file.source.columns, file.structured)
        options = {"report": tally.report, "skip": tally.skip}
        for number, pair in numbered_pairs(file.source, file.form, rows, self.kwise_rule, **options):
            if self.held_out_prompts and folded_prompt_id(pair.prompt) in self.held_out_prompts:
                reason = "its prompt also stands in data.val (case and blanks aside)"
                row = SkippedRow(file.source.path, number, reason)
                raise DataError(f"{row}; remove it from one, or set data.allow_prompt_overlap=true")
            yield number, pair


@dataclass(frozen=True, eq=False)
class BlockTokenizer:
    """Turns blocks into tokenized pairs; the same in every process."""

    reader: BlockReader
    renderer: ConversationRenderer

    def tokenize(self, block: Block) -> BlockTokens:
        """The block's pairs as token ids.

        Raises:
            DataError: if a row is bad, its prompt is held out, or the chat template refuses it.
        """
        tally = self.reader.tally(block.file)
        numbered = list(self.reader.pairs(block, tally))
        try:
            encodings = self._encoded(numbered)
        except ConversationRefused:
            numbered = self._accepted(numbered, tally)
            encodings = self._encoded(numbered)
        rows = np.array([block.stream_row + number - 1 for number, _ in numbered], dtype=np.int64)
        marks = pair_fingerprints(pair for _, pair in numbered)
        return _block_tokens(encodings, rows, PairValues.of(pair for _, pair in numbered), tally, marks)

    def _encoded(self, numbered: Sequence[tuple[int, PreferencePair]]) -> list[Encoding]:
        prompts = [pair.prompt for _, pair in numbered for _ in range(2)]
        return self.renderer.encode_batch(
            prompts, [text for _, pair in numbered for text in (pair.chosen, pair.rejected)]
        )

    def _accepted(
        self, numbered: Sequence[tuple[int, PreferencePair]], tally: RowTally
    ) -> list[tuple[int, PreferencePair]]:
        """The pairs that can be rendered; the rows of the others are bad, each once."""
        accepted: list[tuple[int, PreferencePair]] = []
        refused: set[int] = set()
        for number, pair in numbered:
            if (reason := self.renderer.refusal(pair)) is None:
                accepted.append((number, pair))
            elif number not in refused:
                refused.add(number)
                tally.report(number, reason)
        return accepted


def _block_tokens(
    encodings: Sequence[Encoding],
    rows: NDArray[np.int64],
    values: PairValues,
    rows_read: RowTally,
    marks: NDArray[np.uint64],
) -> BlockTokens:
    cuts = np.array([(side.prompt_cut, side.response_cut) for side in encodings], dtype=np.int32).reshape(-1, 2, 2)
    lengths = np.array([len(side.ids) for side in encodings], dtype=np.int64).reshape(-1, 2)
    sides = zip(encodings[0::2], encodings[1::2], strict=True)
    kept = np.array([chosen.ids != rejected.ids for chosen, rejected in sides], dtype=bool)
    tokens = np.fromiter(
        chain.from_iterable(side.ids for i, side in enumerate(encodings) if kept[i // 2]), dtype=np.int32
    )
    numbers = PairValues(*(column[kept] for column in vars(values).values()))
    pairs = PairArrays(tokens, lengths[kept], rows[kept], numbers)
    return BlockTokens(pairs, lengths + cuts.sum(axis=2), cuts, rows_read, marks)
