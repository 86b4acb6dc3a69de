"""Training pairs that Ray streams from files; validation stays in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.overlap import TrainedPairs
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.streaming.dataset import RayPreferenceDataset
from rm_optimizer.core.streaming.order import MacroBatchStream, StreamPosition, StreamTally
from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.core.tokens.dataset import TrainVal, distinct_prompts, load_pairs
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import DataConfig
from rm_optimizer.training.data.in_memory import PreferenceDataModule

FIRST_PAIRS = 4096
"""Streamed pairs that are also in memory: for training a tokenizer, testing prefix sharing, and the mean weight."""


@dataclass(frozen=True, kw_only=True)
class StreamedTrainVal(TrainVal):
    """Pairs of a streaming run; `train` holds the first pairs of the stream only.

    Args:
        stream: all training pairs.
    """

    stream: RayPreferenceDataset

    @property
    def fingerprints(self) -> tuple[str, str]:
        """Digests of the files that are streamed and of the validation pairs."""
        return self.stream.fingerprint, self.val.fingerprint

    def notes(self, *, uses_margins: bool) -> tuple[str, ...]:
        """Sentences on the pairs; if only some of them were examined, their number is stated."""
        found = super().notes(uses_margins=uses_margins)
        if len(self.train) < FIRST_PAIRS:
            return found
        looked = f"data.streaming=ray: labels, margins and conversations are those of the first {FIRST_PAIRS:,} pairs"
        return (*found, f"{looked}; conversations of data.val that continue one of a later pair are not found")


def stream_pairs(config: DataConfig, max_steps: int | None) -> StreamedTrainVal:
    """Training pairs to be streamed and validation pairs in memory, according to the options.

    Raises:
        ConfigError: if streaming lacks an option that it needs, or has one that it cannot follow.
        DataError: if a source or row is bad, or prompts overlap and that is not allowed.
    """
    for option, is_wrong, reason in (
        ("data.train", config.train is None, "be set, since the synthetic world is in memory already"),
        ("data.val", config.val is None, "be set, since validation cannot be split off pairs that are not yet read"),
        ("training.max_steps", max_steps is None, "be set, since the pairs of an epoch are not yet counted"),
        ("data.max_pairs", config.max_pairs is not None, "be null; limit the run by training.max_steps"),
    ):
        if is_wrong:
            raise ConfigError(f"with data.streaming=ray, {option} must {reason}")
    val = load_pairs(config.val, config)
    stream = RayPreferenceDataset(
        config.train,
        format=config.format,
        columns=config.columns or {},
        winner=config.winner,
        kwise_rule=config.kwise_rule,
        on_bad_row=config.on_bad_row,
        max_bad_share=config.max_bad_share,
        held_out_prompts=() if config.allow_prompt_overlap else [*distinct_prompts(val).values()],
    )
    return StreamedTrainVal(stream.first_pairs(FIRST_PAIRS), val, str(config.val), stream=stream)


class StreamLoader:
    """Training steps from a position of the stream on, with the state that Lightning saves and restores."""

    def __init__(self, module: StreamingDataModule) -> None:
        self._module = module
        self._start = StreamPosition()
        self._stream: MacroBatchStream | None = None

    def __len__(self) -> int:
        """Optimizer steps of the whole run."""
        return self._module.num_steps

    def __iter__(self) -> Iterator[MacroBatch]:
        """Macro-batches from the position on, to the last step of the run."""
        self._stream = self._module.open_stream()
        self._stream.position = self._start
        return self._until_last(self._stream)

    def _until_last(self, stream: MacroBatchStream) -> Iterator[MacroBatch]:
        batches = iter(stream)
        while stream.position.step < self._module.num_steps:
            batch = next(batches)
            yield batch.pin_memory() if self._module.pin_memory else batch

    def state_dict(self) -> dict[str, int]:
        """The position after the last step taken."""
        return asdict(self._stream.position if self._stream is not None else self._start)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position; blocks before it are not read again."""
        self._start = StreamPosition(**state)


class StreamingDataModule(PreferenceDataModule):
    """Pairs of a run with streamed training pairs; an epoch ends with the run or with a pass over all rows.

    Args:
        data: the streamed pairs and those of validation.
        model: model that renders conversations.
        options: the other arguments of `PreferenceDataModule`; the run has `max_steps`.

    Raises:
        DataError: if a split has no pair left after truncation.
    """

    holds_all_pairs = False

    def __init__(self, data: TrainVal, *, model: BradleyTerryRM, **options: Any) -> None:
        assert isinstance(data, StreamedTrainVal), "other pairs are in memory"
        super().__init__(data, model=model, **options)
        self._data_stream = data.stream
        self._renderer = model.renderer
        self._open: MacroBatchStream | None = None
        self._tally = StreamTally()
        self.steps_per_epoch = min(self.num_steps, -(-data.stream.num_rows // self.batching.batch_size))

    def train_dataloader(self) -> StreamLoader:  # type: ignore[override]
        """The run's macro-batches, one an optimizer step."""
        return StreamLoader(self)

    def open_stream(self) -> MacroBatchStream:
        """Stream of this rank's workers, which `teardown` ends. Lightning calls this twice; they are started once."""
        if self._open is not None:
            return self._open
        trainer = self.trainer
        self._open = self._data_stream.macro_batches(
            self._renderer,
            batch_size=self.batching.batch_size,
            micro_token_budget=self.batching.micro_token_budget,
            seed=self.seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            prefix_sharing=self.shares_prefixes,
            mean_weight=self._collator.mean_weight,
            num_workers=self.config.num_workers,
            fetch_timeout=self.config.fetch_timeout,
            store_mb=self.config.streaming_store_mb,
        )
        self._tally = self._open.tally
        return self._open

    def close(self) -> None:
        """End the workers."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def teardown(self, stage: str) -> None:
        """End the workers, also after a failure of the run."""
        self.close()

    def pair_ids(self, pair_index: np.ndarray) -> list[str]:
        """Files and rows of training pairs."""
        return [self._data_stream.row_name(int(index)) for index in pair_index]

    @property
    def num_train_pairs(self) -> int:
        """Different training pairs read by this process."""
        return self._tally.num_kept

    @property
    def skipped(self) -> Sequence[SkippedRow]:
        """Rows among those read so far that gave no pair."""
        return [*self._tally.skipped, *self.data.val.skipped]

    @property
    def num_skipped(self) -> int:
        """Number of the rows read so far that gave no pair."""
        return self._tally.num_skipped + len(self.data.val.skipped)

    def trained_pairs(self) -> TrainedPairs:
        """Fingerprints of the training pairs read by this process."""
        return self._tally.trained()

    def truncation(self) -> dict[str, Any]:
        """Token and truncation counts of the pairs read, and of validation."""
        return super().truncation() | {"train": asdict(self._tally.report(self._renderer.max_length))}
