"""Counts of a stream so far: pairs, rows left out, and truncation, each block counted once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.trained_pairs import TrainedPairs
from rm_optimizer.core.rows.bad_rows import RowTally, SkippedRow, require_few_bad
from rm_optimizer.core.streaming.blocks import Block
from rm_optimizer.core.streaming.tokens import BlockTokens
from rm_optimizer.core.tokens.cache import TruncationReport

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
            require_few_bad(rows.path, file.causes, file.num_rows, rows.max_bad_share, rows.spelling)

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
