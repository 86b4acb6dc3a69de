"""Preference pairs that do not fit into memory, streamed from files into the batches that training takes."""

from __future__ import annotations

import hashlib
import itertools
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

from torch.utils.data import DataLoader, IterableDataset

from rm_optimizer.core.pairs.pair import folded_prompt_id
from rm_optimizer.core.pairs.source_pairs import SourcePairs
from rm_optimizer.core.pairs.sources import parse_sources
from rm_optimizer.core.rows.bad_rows import PairRow
from rm_optimizer.core.rows.natural import Prompts, prompts_of
from rm_optimizer.core.rows.readers import row_unit
from rm_optimizer.core.streaming.blocks import BLOCK_BYTES, BlockReader, BlockTokenizer, blocks_of, stream_files
from rm_optimizer.core.streaming.order import MacroBatchStream, StreamOrder
from rm_optimizer.core.streaming.workers import TokenizerPool
from rm_optimizer.core.tokens.batching import BatchShape, MacroBatch
from rm_optimizer.core.tokens.chat import ConversationRenderer, renderer_of
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.schema.data import ReadOptions, read_config

WINDOW_BLOCKS = 16
"""Blocks whose pairs are mixed: about 32 MB of text."""


class RayPreferenceDataset:
    """Pairs in Parquet and JSON Lines files of any size, read and tokenized by Ray workers as they are needed.

    Rows give the same pairs as in `PreferenceDataset`. Two windows of blocks are in memory, for files of any size, and
    nothing is written to disk.

    Args:
        source: a path, a pattern such as `big/*.parquet`, a mapping `{path, weight, format, columns, label}`, or a list
            of these; weights are whole numbers.
        tokenizer: a tokenizer or a `BradleyTerryRM`, for `to_torch_dataloader`.
        max_length: most tokens of a sequence; None is the model's, or what the tokenizer states, at most 1024.
        held_out_prompts: prompts of the validation pairs, which the stream must not hold; case and blanks do not
            count.
        block_bytes: text of a block, about.
        options: how rows are read, as `ReadOptions` lists them. Shares of bad rows are judged from 1,000 rows on.

    Raises:
        DataError: if a file does not exist, cannot be read in parts, or its columns fit no format.
        ConfigError: if an option of a source is wrong.
    """

    def __init__(
        self,
        source: object,
        tokenizer: object = None,
        max_length: int | None = None,
        *,
        held_out_prompts: Prompts = (),
        block_bytes: int = BLOCK_BYTES,
        **options: Unpack[ReadOptions],
    ) -> None:
        config = read_config("RayPreferenceDataset", options)
        files = stream_files(parse_sources(source, config))
        self.renderer = None if tokenizer is None else renderer_of(tokenizer, max_length)
        self.reader = BlockReader(
            files, config, frozenset(map(folded_prompt_id, prompts_of("held_out_prompts", held_out_prompts)))
        )
        self.blocks = blocks_of(files, block_bytes)

    def __repr__(self) -> str:
        return f"RayPreferenceDataset({self.num_rows} rows in {len(self.reader.files)} files)"

    @property
    def num_rows(self) -> int:
        """Rows of all files; a row may give no pair, or several."""
        last = self.blocks[-1]
        return last.stream_row + last.first_row - 1 + last.num_rows

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the files' names, sizes and times of change, and of how they are read.

        It does not depend on the treatment of bad rows, which may end a stream but does not change its pairs before.
        """
        content = hashlib.sha256(repr((self.reader.options.kwise_rule.value,)).encode())
        for file in self.reader.files:
            path, layout, found = file.source.path, file.source.layout, os.stat(file.source.path)
            place = (os.path.abspath(os.path.expanduser(path)), found.st_size, found.st_mtime_ns)
            rest = {key: value for key, value in layout.to_dict().items() if key not in ("columns", "format", "winner")}
            known = (*place, file.form.name, sorted(layout.columns.items()), layout.winner, *rest.items())
            content.update(repr(known).encode())
        return content.hexdigest()[:16]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on columns that look like content and are not read, one for each source."""
        return tuple(dict.fromkeys(note for file in self.reader.files for note in file.notes))

    def first_pairs(self, num_pairs: int) -> PreferenceDataset:
        """Up to `num_pairs` pairs from the start of the files, read in this process, and the rows skipped among them.

        Raises:
            DataError: if a row among them is bad and that is not to be passed over.
        """
        # Of the few rows read of the last file no share is judged; the stream does.
        reader = replace(self.reader, options=replace(self.reader.options, max_bad_share=1.0))
        tallies = tuple(map(reader.tally, range(len(reader.files))))
        numbered = ((block.file, row) for block in self.blocks for row in reader.pairs(block, tallies[block.file]))
        found = list(itertools.islice(numbered, num_pairs))
        rows = tuple(PairRow(tallies[file], number) for file, (number, _) in found)
        skipped = tuple(row for tally in tallies for row in tally.skipped)
        pairs = SourcePairs(tuple(pair for _, (_, pair) in found), skipped, rows, self.notes)
        return PreferenceDataset(replace(pairs, over_long=self.reader.options.over_long))

    def to_torch_dataloader(
        self, batch_size: int = 32, *, shuffle: bool = True, seed: int = 0
    ) -> DataLoader[MacroBatch]:
        """Load one pass over the pairs in batches, as `create_dataloader` does for pairs in memory.

        Args:
            batch_size: pairs of a batch.
            shuffle: mix blocks and pairs; False keeps the order of the files.
            seed: seed of the order, not negative.

        Raises:
            TypeError: if the data set has no tokenizer.
            MissingExtra: if Ray is not installed.
        """
        if self.renderer is None:
            raise TypeError("to_torch_dataloader needs a tokenizer; give it as the data set's second argument")
        return DataLoader(_OnePass(self, self.renderer, batch_size, shuffle, seed), batch_size=None)

    def row_name(self, index: int) -> str:
        """File and row of a pair, by its `pair_index` in a batch."""
        block = self.blocks[bisect_right([block.stream_row for block in self.blocks], index) - 1]
        path = self.reader.files[block.file].source.path
        return f"{path}, {row_unit(path)} {index - block.stream_row + 1}"

    def macro_batches(
        self,
        renderer: ConversationRenderer,
        *,
        batch_size: int,
        micro_token_budget: int,
        seed: int,
        shuffle: bool = True,
        start_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        mean_weight: float = 1.0,
        prefix_sharing: bool = False,
        num_workers: int = 0,
        fetch_timeout: float = 60.0,
        store_mb: int = 256,
    ) -> MacroBatchStream:
        """Start workers and stream macro-batches of whole pairs; close the stream, or use it as a context, to end them.

        The order is a function of `seed` and the epoch, whatever the number of workers: the blocks are permuted, and
        the pairs of each `WINDOW_BLOCKS` of them. `pair_index` of a batch is the row of the stream, from 0.

        Args:
            renderer: renderer that makes the token ids.
            batch_size: pairs of a macro-batch, over all ranks.
            micro_token_budget: tokens of a micro-batch, padding included.
            seed: seed of the order, not negative.
            shuffle: mix blocks and pairs; False keeps the order of the files.
            start_step: first step to give; pairs before it are counted, which costs as much as giving them. A stream's
                `position`, kept and set again, costs nothing.
            rank: rank of the process, in [0, world_size).
            world_size: number of ranks; each has its own workers.
            mean_weight: mean weight of the pairs, by which a step's loss is divided, as far as it is known.
            prefix_sharing: give `PackedPairBatch`es rather than `PairBatch`es.
            num_workers: Ray workers; 0 is one a core.
            fetch_timeout: seconds that a block may take.
            store_mb: memory of Ray's object store, in MB, at least 80.

        Raises:
            ValueError: if a number is out of its range.
            MissingExtra: if Ray is not installed.
        """
        shape = BatchShape(batch_size, micro_token_budget, rank, world_size, mean_weight)
        order = StreamOrder(self.blocks, WINDOW_BLOCKS, seed, shuffle)
        pool = TokenizerPool(
            BlockTokenizer(self.reader, renderer),
            num_workers=num_workers or os.cpu_count() or 1,
            store_mb=store_mb,
            fetch_timeout=fetch_timeout,
        )
        stream = MacroBatchStream(pool, order, shape, renderer.pad_token_id, prefix_sharing)
        if start_step:
            stream.seek(start_step)
        return stream


@dataclass
class _OnePass(IterableDataset[MacroBatch]):
    data: RayPreferenceDataset
    renderer: ConversationRenderer
    batch_size: int
    shuffle: bool
    seed: int

    def __iter__(self) -> Iterator[MacroBatch]:
        tokens = 2 * self.batch_size * self.renderer.max_length  # a batch in one piece
        with self.data.macro_batches(
            self.renderer, batch_size=self.batch_size, micro_token_budget=tokens, seed=self.seed, shuffle=self.shuffle
        ) as stream:
            yield from itertools.takewhile(lambda _: stream.position.epoch == 0, stream)
