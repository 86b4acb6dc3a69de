"""Macro-batches of a stream in an order of seed and epoch alone, from any position on, and counts of its rows."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.rows.bad_rows import SkippedRow, require_few_bad
from rm_optimizer.core.streaming.blocks import Block, BlockTokens, PairArrays
from rm_optimizer.core.streaming.workers import TokenizerPool
from rm_optimizer.core.tokens.batching import BatchShape, MacroBatch, pair_collator
from rm_optimizer.core.tokens.cache import TruncationReport, cut_counts
from rm_optimizer.errors import DataError
from rm_optimizer.records.orders import epoch_order

LISTED_ROWS = 10_000
"""Skipped rows that are kept to be listed; further ones are only counted."""
JUDGED_ROWS = 1000
"""Rows of a file that must be read, or all of them, before their share of bad ones stops the stream."""
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_NO_PAIR = "no pair is left to train on: each row is skipped or its responses are identical"


class StreamTally:
    """Counts of the blocks seen, and 16 bytes of fingerprints for each of their pairs.

    Args:
        blocks: all blocks of the stream.

    Attributes:
        skipped: the first rows that gave no pair.
        num_skipped: number of rows that gave none.
        fingerprints: `pair_fingerprints` of the pairs of each block seen.
    """

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self._rows_of: Counter[int] = Counter()  # of each file, like the next three
        for block in blocks:
            self._rows_of[block.file] += block.num_rows
        self._num_read: Counter[int] = Counter()
        self._num_rows: Counter[int] = Counter()
        self._causes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.skipped: list[SkippedRow] = []
        self.num_skipped = 0
        self._kept: dict[Block, int] = {}
        self.fingerprints: list[NDArray[np.uint64]] = []
        self._cut = Counter(cut_counts(np.zeros((0, 2, 2), dtype=np.int32)))
        self._tokens_cut = 0
        self._of_length: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    @property
    def num_kept(self) -> int:
        """Pairs of the blocks seen, those identical after cutting left out."""
        return sum(self._kept.values())

    def kept(self, block: Block) -> int | None:
        """Pairs of one block, or None if it was not seen yet."""
        return self._kept.get(block)

    def add(self, block: Block, tokens: BlockTokens) -> None:
        """Count a block, unless it was counted before.

        Raises:
            DataError: if too many rows of its file are bad, of all or of the first `JUDGED_ROWS` and more.
        """
        if block in self._kept:
            return
        self._kept[block] = len(tokens.pairs)
        self.fingerprints.append(tokens.fingerprints)
        rows, file = tokens.rows, block.file
        self._num_read[file] += block.num_rows
        self._num_rows[file] += rows.num_rows
        self._causes[file] += rows.causes()
        if self._num_read[file] >= min(JUDGED_ROWS, self._rows_of[file]):
            require_few_bad(rows.path, self._causes[file], self._num_rows[file], rows.max_bad_share)
        self.num_skipped += len(rows.skipped)
        self.skipped += rows.skipped[: LISTED_ROWS - len(self.skipped)]
        self._cut.update(cut_counts(tokens.cuts))
        self._tokens_cut += int(tokens.cuts.sum())
        counts = np.bincount(tokens.lengths.ravel(), minlength=len(self._of_length))
        counts[: len(self._of_length)] += self._of_length
        self._of_length = counts

    def report(self, max_length: int) -> TruncationReport:
        """Effect of truncation on the pairs so far; a quantile is the length of one of their sequences."""
        running = np.cumsum(self._of_length)
        ranks = [quantile * max(0, running[-1] - 1) for quantile in _QUANTILES]
        lengths = np.searchsorted(running, ranks, side="right") if running[-1] else np.zeros(4)
        num_tokens = int((self._of_length * np.arange(len(self._of_length))).sum())
        return TruncationReport(
            max_length=max_length,
            num_identical_dropped=self._cut["num_pairs"] - self.num_kept,
            **self._cut,
            tokens_cut_share=self._tokens_cut / max(1, num_tokens),
            length_quantiles={f"{q:g}": float(length) for q, length in zip(_QUANTILES, lengths, strict=True)},
        )


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position of a stream between two macro-batches.

    Args:
        step: the optimizer step of the next one.
        epoch: pass over the data with its first pair.
        window: window of blocks with that pair.
        offset: pairs of that window before it.
    """

    step: int = 0
    epoch: int = 0
    window: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StreamOrder:
    """The order of a stream, a function of seed and epoch alone.

    An epoch takes the blocks in its own order, `window_blocks` at a time, and the pairs of such a window in a
    random order; without shuffling both are the order of the files.

    Args:
        blocks: the blocks in the order of the files.
        window_blocks: blocks whose pairs are mixed; two windows are held at once.
        seed: not negative.
        shuffle: True to shuffle the pairs.
    """

    blocks: Sequence[Block]
    window_blocks: int
    seed: int
    shuffle: bool

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return -(-len(self.blocks) // self.window_blocks)

    def window(self, epoch: int, window: int) -> list[Block]:
        """The blocks of one window."""
        order = self._permutation(len(self.blocks), (epoch,))
        return [self.blocks[i] for i in order[window * self.window_blocks : (window + 1) * self.window_blocks]]

    def pairs(self, num_pairs: int, epoch: int, window: int) -> NDArray[np.int64]:
        """The order of a window's pairs."""
        return self._permutation(num_pairs, (epoch, window + 1))  # a 0 would seed what the epoch alone seeds

    def windows_from(self, epoch: int, window: int) -> Iterator[tuple[int, int]]:
        """Epoch and window from a given one on, without end."""
        yield from ((epoch, later) for later in range(window, self.num_windows))
        for later_epoch in itertools.count(epoch + 1):
            yield from ((later_epoch, later) for later in range(self.num_windows))

    def _permutation(self, size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
        return epoch_order(size, self.seed, *key) if self.shuffle else np.arange(size)


@dataclass(eq=False)
class MacroBatchStream:
    """Macro-batches of a stream, one an optimizer step, without end; the last of an epoch may be short.

    The next window is tokenized while the batches of this one are given.

    Args:
        pool: tokenizes blocks; closed with the stream.
        order: order of the blocks and pairs.
        shape: shape of the macro-batches.
        pad_token_id: the id that fills masked positions.
        prefix_sharing: give `PackedPairBatch`es rather than `PairBatch`es.

    Attributes:
        position: before the next macro-batch; set it to start elsewhere.
        tally: counts of the stream so far.
    """

    pool: TokenizerPool
    order: StreamOrder
    shape: BatchShape
    pad_token_id: int
    prefix_sharing: bool = False
    position: StreamPosition = field(default_factory=StreamPosition, init=False)

    def __post_init__(self) -> None:
        self.tally = StreamTally(self.order.blocks)

    def __iter__(self) -> Iterator[MacroBatch]:
        """Macro-batches from the position on.

        Raises:
            DataError: if a row is bad, or no pair is left of a whole epoch.
            DataStalled: if a block does not come in time.
        """
        rest: list[PairArrays] = []  # pairs of earlier windows that the next batch begins with
        offset = self.position.offset
        asked: deque[tuple[int, int, list[Block], list[Any]]] = deque()
        for ahead in self.order.windows_from(self.position.epoch, self.position.window):
            blocks = self.order.window(*ahead)
            asked.append((*ahead, blocks, self.pool.ask(blocks)))
            if len(asked) < 2:
                continue
            epoch, window, blocks, tokens = asked.popleft()
            pairs = PairArrays.concatenate([found.pairs for found in self._collect(blocks, tokens)])
            order = self.order.pairs(len(pairs), epoch, window)
            is_last = window + 1 == self.order.num_windows
            while True:
                num_carried, num_left = sum(map(len, rest)), len(order) - offset
                missing = self.shape.batch_size - num_carried
                if num_left < missing and not (is_last and (num_left or num_carried)):
                    break
                taken = order[offset : offset + missing]
                batch = PairArrays.concatenate([*rest, pairs.take(taken)])
                rest, offset, step = [], offset + len(taken), self.position.step
                self.position = StreamPosition(step + 1, epoch, window, offset)
                collator = pair_collator(batch, batch.values, self.pad_token_id, prefix_sharing=self.prefix_sharing)
                yield self.shape.macro_batch(collator, np.arange(len(batch)), step)
            if is_last and not self.tally.num_kept:
                raise DataError(_NO_PAIR)
            if not is_last:
                rest.append(pairs.take(order[offset:]))
            offset = 0

    def seek(self, step: int) -> None:
        """Set the position before an optimizer step; blocks before it whose pairs were never counted are read."""
        before = step
        for epoch in itertools.count():
            seen = 0
            for window in range(self.order.num_windows):
                blocks = self.order.window(epoch, window)
                unknown = [block for block in blocks if self.tally.kept(block) is None]
                self._collect(unknown, self.pool.ask(unknown))
                num_pairs = sum(self.tally.kept(block) or 0 for block in blocks)
                if seen + num_pairs > before * self.shape.batch_size:
                    self.position = StreamPosition(step, epoch, window, before * self.shape.batch_size - seen)
                    return
                seen += num_pairs
            if not seen:
                raise DataError(_NO_PAIR)
            before -= -(-seen // self.shape.batch_size)

    def _collect(self, blocks: Sequence[Block], asked: list[Any]) -> list[BlockTokens]:
        collected = []
        for block, tokens in zip(blocks, self.pool.collect(asked), strict=True):
            self.tally.add(block, tokens)
            collected.append(tokens)
        return collected

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def __enter__(self) -> MacroBatchStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
