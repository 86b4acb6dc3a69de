"""Pairs of a run: loading, order of training, batches, and training pairs that Ray streams from files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.rows.readers import read_rows, refusing
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.streaming.dataset import RayPreferenceDataset
from rm_optimizer.core.streaming.order import MacroBatchStream, StreamPosition, StreamTally
from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.core.tokens.dataset import PreferenceDataset, distinct_prompts, load_pairs
from rm_optimizer.core.tokens.splits import TrainVal, load_training_data, require_disjoint_prompts, split_off
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.orders import PairOrder
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.schema.data import OWN_MARGINS, OverLong, ReadOptions, Streaming
from rm_optimizer.training.data.curriculum import BINS, CurriculumSampler
from rm_optimizer.training.data.in_memory import PreferenceDataModule


def order_of(data: TrainVal, config: TrainConfig, given: PairOrder | None = None) -> PairOrder | None:
    """Order of the training pairs; None shuffles them by the seed.

    Args:
        data: the pairs.
        config: options of the run.
        given: the caller's order.

    Raises:
        ConfigError: if both the caller and `data.curriculum` give one, or all pairs are in one bin.
        DataError: if a pair has no margin.
    """
    options = config.data
    if options.curriculum is None:
        return given
    if given is not None:
        raise ConfigError("train_reward_model(order=…) gives an order, so data.curriculum must not be set")
    num_pairs, steps = len(data.train), config.training.max_steps
    sampler = CurriculumSampler(
        training_margins(data.train, options.curriculum, num_processes=config.hardware.devices),
        easy_above=options.curriculum_easy,
        hard_below=options.curriculum_hard,
        quantiles=options.curriculum_quantiles,
        num_epochs=steps * config.batching.batch_size / num_pairs if steps else config.training.epochs,
        covers=options.curriculum_covers,
        seed=config.seed,
    )
    filled = [name for name, members in zip(BINS, sampler.bins, strict=True) if len(members)]
    if len(filled) == 1:
        raise ConfigError(
            f"data.curriculum finds all {num_pairs:,} pairs {filled[0]}, so there is no order among them; set "
            "data.curriculum_quantiles=true, or other data.curriculum_easy and data.curriculum_hard"
        )
    return sampler.order()


def training_margins(pairs: PreferenceDataset, source: str, *, num_processes: int = 1) -> Float[np.ndarray, " pairs"]:
    """Nonnegative margins; the larger a pair's margin, the easier it is.

    Args:
        pairs: training pairs.
        source: `margin` for the pairs' own margins, a JSON Lines file, or a saved reward model. Rows of a file have
            `pair_id` and `margin`, or `chosen` and `rejected` rewards as in `pair_rewards.jsonl`. Margins of a file or
            a model are rewards of `chosen` less `rejected`; one against the label, or of a tie, counts as 0 (hardest).
        num_processes: number of training processes, all of which must have the same margins.

    Raises:
        ConfigError: if a model is named for several processes, in which its rewards may differ by rounding.
        DataError: if a pair has no margin.
    """
    path = Path(source).expanduser()
    if source == OWN_MARGINS:
        found: Sequence[float | None] = [pair.margin for pair in pairs]
        lacking = "data.curriculum=margin needs a margin for every training pair"
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        known = _file_margins(path)
        found = [_for_label(pair, known[pair.pair_id]) if pair.pair_id in known else None for pair in pairs]
        lacking = f"data.curriculum={source} needs a row for every training pair"
    elif num_processes > 1:
        raise ConfigError(
            f"data.curriculum={source} is a model, whose rewards may round apart in {num_processes} processes; name "
            "the pair_rewards.jsonl that rm-opt evaluate writes for the training pairs"
        )
    else:
        model = BradleyTerryRM.from_pretrained(source)
        prompts = [pair.prompt for pair in pairs]
        chosen, rejected = ([getattr(pair, side) for pair in pairs] for side in ("chosen", "rejected"))
        margins = (model.score(prompts, chosen) - model.score(prompts, rejected)).tolist()
        found = [_for_label(pair, margin) for pair, margin in zip(pairs, margins, strict=True)]
        lacking = f"data.curriculum={source} gives every pair a margin"
    missing = [number for number, margin in enumerate(found, start=1) if margin is None]
    if missing:
        raise DataError(
            f"{lacking}, but {len(missing):,} of {len(found):,} have none, the first is pair {missing[0]:,}"
        )
    return np.asarray(np.maximum(np.array(found, dtype=float), 0.0))


def _file_margins(path: Path) -> dict[str, float]:
    """Margins of a file by pair id."""
    refuse, found = refusing(path), dict[str, float]()
    for number, row in read_rows(path, refuse):
        try:
            key = str(row["pair_id"])
            margin = float(row["margin"] if "margin" in row else row["chosen"] - row["rejected"])
        except (KeyError, TypeError, ValueError):
            shown = json.dumps(row, default=str)[:80]
            refuse(number, f"expected pair_id and margin, or the rewards chosen and rejected, got {shown}")
        if not math.isfinite(margin):
            refuse(number, f"expected a finite margin of pair {key}, got {margin}")
        if found.setdefault(key, margin) != margin:
            refuse(number, f"expected one margin of pair {key}, got {found[key]:g} and {margin:g}; leave one out")
    return found


def _for_label(pair: PreferencePair, margin: float) -> float:
    """Margin of the preferred response, from the margin of `chosen` over `rejected`; 0 for a tie."""
    return margin * float(np.sign(pair.label - 0.5))


def pairs_in_memory(train: object, val: object, config: DataConfig) -> TrainVal:
    """Pairs of a run of which some are in memory; without `val` a share of the training prompts is held out.

    Raises:
        ConfigError: if there are only validation pairs.
        DataError: if a row is no pair.
    """
    if train is None:
        raise ConfigError("val gives validation pairs in memory, so data_path must give the training pairs, got None")
    if isinstance(train, TrainVal):
        return train
    if val is not None:
        return TrainVal(load_pairs(train, config), load_pairs(val, config))
    return split_off(load_pairs(train, config), config)


def load_data(config: TrainConfig, given: TrainVal | None = None) -> TrainVal:
    """Training and validation pairs of a run: the given ones, or those in the options.

    Raises:
        ConfigError: if streaming lacks an option that it needs, or has one that it cannot follow; or options name
            pairs although some are given.
        DataError: if a source or row is bad, or prompts overlap and that is not allowed.
    """
    if given is not None:
        _require_pairs(given, config.data)
        if config.data.over_long == OverLong.truncate:
            return given
        train, val = (PreferenceDataset(data, over_long=config.data.over_long) for data in (given.train, given.val))
        return replace(given, train=train, val=val)
    if config.data.streaming == Streaming.off:
        return load_training_data(config.data)
    return stream_pairs(config.data, config.training.max_steps)


def _require_pairs(data: TrainVal, config: DataConfig) -> None:
    """Refuse pairs in memory that are empty, that overlap, or that the options name too."""
    if not isinstance(data, TrainVal) or not all(isinstance(x, PreferenceDataset) for x in (data.train, data.val)):
        raise TypeError("data must be a TrainVal of two PreferenceDatasets; PreferenceDataset(pairs) makes one")
    for option, is_set in (
        ("data.train", config.train is not None),
        ("data.val", config.val is not None),
        ("data.max_pairs", config.max_pairs is not None),
        ("data.streaming", config.streaming != Streaming.off),
    ):
        if is_set:
            raise ConfigError(f"the run's pairs are in memory already, so {option} must not be set")
    for name, split in (("training", data.train), ("validation", data.val)):
        if not len(split):
            raise DataError(f"train_reward_model needs {name} pairs, got none")
    if not config.allow_prompt_overlap:
        require_disjoint_prompts(data.train, data.val)


def data_module(
    data: TrainVal, config: TrainConfig, model: BradleyTerryRM, order: PairOrder | None = None
) -> PreferenceDataModule:
    """Batches of the pairs that `load_data` returned.

    Raises:
        ConfigError: if streamed pairs are to come in an order.
        DataError: if a split has no pair left after truncation.
    """
    if order is not None and isinstance(data, StreamedTrainVal):
        raise ConfigError("an order needs pairs in memory; set data.streaming=off, or leave out order")
    kind = StreamingDataModule if isinstance(data, StreamedTrainVal) else PreferenceDataModule
    return kind(data, config, model, order)


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
        looked = f"data.streaming=ray: labels, margins and conversations are from the first {FIRST_PAIRS:,} pairs"
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
    options = {name: getattr(config, name) for name in ReadOptions.__annotations__.keys() - {"seed"}}
    held_out = () if config.allow_prompt_overlap else [*distinct_prompts(val).values()]
    stream = RayPreferenceDataset(config.train, held_out_prompts=held_out, **cast("ReadOptions", options))
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
        stream = self._stream = self._module.open_stream()
        stream.position = self._start
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
        data: the streamed training pairs, and the validation pairs.
        config: options of the run, with `training.max_steps`.
        model: model that renders conversations.
        order: None, since streamed pairs have their own order.

    Raises:
        DataError: if a split has no pair left after truncation.
    """

    holds_all_pairs = False

    def __init__(
        self, data: TrainVal, config: TrainConfig, model: BradleyTerryRM, order: PairOrder | None = None
    ) -> None:
        assert isinstance(data, StreamedTrainVal), "other pairs are in memory"
        super().__init__(data, config, model, order)
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
        self._open = self._data_stream.macro_batches(
            self._renderer,
            **vars(self.batch_shape),
            seed=self.seed,
            prefix_sharing=self.shares_prefixes,
            num_workers=self.config.num_workers,
            fetch_timeout=self.config.fetch_timeout,
            store_mb=self.config.streaming_store_mb,
        )
        self._tally = self._open.tally
        return self._open

    def teardown(self, stage: str) -> None:
        """End the workers, also after a failure of the run."""
        if self._open is not None:
            self._open.close()
            self._open = None

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
        return TrainedPairs.of(*self._tally.fingerprints)

    def truncation(self) -> dict[str, Any]:
        """Token and truncation counts of the pairs read, and of validation."""
        return super().truncation() | {"train": asdict(self._tally.report(self._renderer.max_length))}
