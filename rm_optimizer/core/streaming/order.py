"""Macro-batches of a stream in an order of seed and epoch alone, from any position on, and counts of its rows."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.orders import epoch_order
from rm_optimizer.core.pairs.overlap import TrainedPairs
from rm_optimizer.core.rows.bad_rows import RowTally, SkippedRow, require_few_bad
from rm_optimizer.core.streaming.blocks import Block, BlockTokens, PairArrays
from rm_optimizer.core.streaming.workers import TokenizerPool
from rm_optimizer.core.tokens.batching import MacroBatch, macro_batch, pair_collator
from rm_optimizer.core.tokens.cache import TruncationReport
from rm_optimizer.errors import DataError

LISTED_ROWS = 10_000
"""Skipped rows that are kept to be listed; further ones are only counted."""
JUDGED_ROWS = 1000
"""Rows of a file that must be read, or all of them, before their share of bad ones stops the stream."""
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


class _FileRows:
    """Rows of a file that were read, those that are bad by their cause, and how many lines or rows that was."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_rows = 0
        self.causes: Counter[str] = Counter()


class StreamTally:
    """Counts of the blocks seen, and 16 bytes of fingerprints for each of their pairs.

    Args:
        blocks: all blocks of the stream.

    Attributes:
        skipped: the first rows that gave no pair.
        num_skipped: number of rows that gave none.
    """

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self._rows_of: Counter[int] = Counter()
        for block in blocks:
            self._rows_of[block.file] += block.part.num_rows
        self._files: defaultdict[int, _FileRows] = defaultdict(_FileRows)
        self.skipped: list[SkippedRow] = []
        self.num_skipped = 0
        self._kept: dict[Block, int] = {}
        self._fingerprints: list[NDArray[np.uint64]] = []
        self._num_pairs = 0
        self._prompt_cut = 0
        self._uneven_cut = 0
        self._response_cut = 0
        self._tokens_cut = 0
        self._of_length: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    @property
    def num_kept(self) -> int:
        """Pairs of the blocks seen, those identical after cutting left out."""
        return sum(self._kept.values())

    def trained(self) -> TrainedPairs:
        """Fingerprints of the pairs of the blocks seen."""
        return TrainedPairs.of(*self._fingerprints)

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
        self._fingerprints.append(tokens.fingerprints)
        self._require_few_bad(block, tokens.rows)
        self.num_skipped += len(tokens.rows.skipped)
        self.skipped += tokens.rows.skipped[: LISTED_ROWS - len(self.skipped)]
        self._num_pairs += len(tokens.lengths)
        self._prompt_cut += int((tokens.cuts[:, :, 0] > 0).any(axis=1).sum())
        self._uneven_cut += int((tokens.cuts[:, 0, 0] != tokens.cuts[:, 1, 0]).sum())
        self._response_cut += int((tokens.cuts[:, :, 1] > 0).any(axis=1).sum())
        self._tokens_cut += int(tokens.cuts.sum())
        counts = np.bincount(tokens.lengths.ravel(), minlength=len(self._of_length))
        counts[: len(self._of_length)] += self._of_length
        self._of_length = counts

    def _require_few_bad(self, block: Block, rows: RowTally) -> None:
        file = self._files[block.file]
        file.num_read += block.part.num_rows
        file.num_rows += rows.num_rows
        file.causes += rows.causes()
        if file.num_read >= min(JUDGED_ROWS, self._rows_of[block.file]):
            require_few_bad(rows.path, file.causes, file.num_rows, rows.max_bad_share)

    def report(self, max_length: int) -> TruncationReport:
        """Effect of truncation on the pairs so far; a quantile is the length of one of their sequences."""
        running = np.cumsum(self._of_length)
        ranks = [quantile * max(0, running[-1] - 1) for quantile in _QUANTILES]
        lengths = np.searchsorted(running, ranks, side="right") if running[-1] else np.zeros(4)
        num_tokens = int((self._of_length * np.arange(len(self._of_length))).sum())
        return TruncationReport(
            max_length=max_length,
            num_pairs=self._num_pairs,
            num_identical_dropped=self._num_pairs - self.num_kept,
            num_prompt_cut=self._prompt_cut,
            num_uneven_prompt_cut=self._uneven_cut,
            num_response_cut=self._response_cut,
            tokens_cut_share=self._tokens_cut / max(1, num_tokens),
            length_quantiles={f"{q:g}": float(length) for q, length in zip(_QUANTILES, lengths, strict=True)},
        )


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position of a stream between two macro-batches.

    Args:
        step: the optimizer step of the next one.
        epoch: pass over the data that its first pair lies in.
        window: window of blocks that it lies in.
        offset: pairs of that window before it.
    """

    step: int = 0
    epoch: int = 0
    window: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StreamOrder:
    """The order of a stream, a function of seed and epoch alone.

    An epoch takes the blocks in an order of its own, `window_blocks` at a time, and the pairs of such a window in a
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


@dataclass(frozen=True)
class BatchShape:
    """Options for dividing pairs into macro-batches.

    Args:
        batch_size: pairs of a macro-batch, over all ranks.
        micro_token_budget: tokens of a micro-batch, padding included.
        pad_token_id: the id that fills masked positions.
        rank: rank of the process.
        world_size: number of ranks.
        prefix_sharing: give `PackedPairBatch`es rather than `PairBatch`es.
        mean_weight: mean weight of the stream's pairs, as far as it is known.
    """

    batch_size: int
    micro_token_budget: int
    pad_token_id: int
    rank: int = 0
    world_size: int = 1
    prefix_sharing: bool = False
    mean_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in [0, {self.world_size}), got {self.rank}")

    def batch(self, pairs: PairArrays, step: int) -> MacroBatch:
        """This rank's share of the macro-batch of these pairs."""
        collator = pair_collator(pairs, pairs.values, self.pad_token_id, prefix_sharing=self.prefix_sharing)
        given = (collator, np.arange(len(pairs)), step, self.micro_token_budget)
        return macro_batch(*given, mean_weight=self.mean_weight, rank=self.rank, world_size=self.world_size)


@dataclass(frozen=True, eq=False)
class _Window:
    epoch: int
    index: int
    pairs: PairArrays
    order: NDArray[np.int64]


class MacroBatchStream:
    """Macro-batches of a stream, one an optimizer step, without end; the last of an epoch may be short.

    The next window is tokenized while the batches of this one are given.

    Args:
        pool: tokenizes blocks; closed with the stream.
        order: order of the blocks and pairs.
        shape: shape of the macro-batches.

    Attributes:
        position: before the next macro-batch; set it to start elsewhere.
        tally: counts of the stream so far.
    """

    def __init__(self, pool: TokenizerPool, order: StreamOrder, shape: BatchShape) -> None:
        self.pool = pool
        self.order = order
        self.shape = shape
        self.position = StreamPosition()
        self.tally = StreamTally(order.blocks)

    def __iter__(self) -> Iterator[MacroBatch]:
        """Macro-batches from the position on.

        Raises:
            DataError: if a row is bad, or no pair is left of a whole epoch.
            DataStalled: if a block does not come in time.
        """
        rest: list[PairArrays] = []
        offset = self.position.offset
        for window in self._windows(self.position.epoch, self.position.window):
            is_last = window.index + 1 == self.order.num_windows
            for batch, end in self._split(rest, window, offset, is_last):
                step, rest, offset = self.position.step, [], end
                self.position = StreamPosition(step + 1, window.epoch, window.index, offset)
                yield self.shape.batch(batch, step)
            if is_last and not self.tally.num_kept:
                raise DataError("no pair is left to train on: each row is skipped or its responses are identical")
            if not is_last:
                rest = [*rest, window.pairs.take(window.order[offset:])]
            offset = 0

    def _split(
        self, rest: Sequence[PairArrays], window: _Window, offset: int, is_last: bool
    ) -> Iterator[tuple[PairArrays, int]]:
        """The macro-batches that end in a window, each with the number of the window's pairs up to its end."""
        size = self.shape.batch_size
        carried = list(rest)
        missing = size - sum(map(len, carried))
        while len(window.order) - offset >= missing or (is_last and (offset < len(window.order) or missing < size)):
            taken = window.order[offset : offset + missing]
            offset += len(taken)
            yield PairArrays.concatenate([*carried, window.pairs.take(taken)]), offset
            carried, missing = [], size

    def seek(self, step: int) -> None:
        """Set the position to that of an optimizer step; blocks before it whose pairs were never counted are read."""
        before = step
        for epoch in itertools.count():
            seen = 0
            for window, num_pairs in enumerate(self._counts(epoch)):
                if seen + num_pairs > before * self.shape.batch_size:
                    self.position = StreamPosition(step, epoch, window, before * self.shape.batch_size - seen)
                    return
                seen += num_pairs
            if not seen:
                raise DataError("no pair is left to train on: each row is skipped or its responses are identical")
            before -= -(-seen // self.shape.batch_size)

    def _counts(self, epoch: int) -> Iterator[int]:
        for window in range(self.order.num_windows):
            blocks = self.order.window(epoch, window)
            unknown = [block for block in blocks if self.tally.kept(block) is None]
            self._collect(unknown, self.pool.ask(unknown))
            yield sum(self.tally.kept(block) or 0 for block in blocks)

    def _windows(self, epoch: int, window: int) -> Iterator[_Window]:
        asked: deque[tuple[int, int, list[Block], list[Any]]] = deque()
        for later_epoch, later in self.order.windows_from(epoch, window):
            blocks = self.order.window(later_epoch, later)
            asked.append((later_epoch, later, blocks, self.pool.ask(blocks)))
            if len(asked) > 1:
                yield self._window(*asked.popleft())

    def _window(self, epoch: int, window: int, blocks: Sequence[Block], asked: list[Any]) -> _Window:
        pairs = PairArrays.concatenate([tokens.pairs for tokens in self._collect(blocks, asked)])
        return _Window(epoch, window, pairs, self.order.pairs(len(pairs), epoch, window))

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
