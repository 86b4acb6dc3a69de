"""Pairs of a run and their batches, in memory or streamed according to the options."""

from __future__ import annotations

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset, TrainVal, load_training_data, require_disjoint_prompts
from rm_optimizer.core.pairs.orders import PairOrder
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.streamed import StreamedTrainVal, StreamingDataModule, stream_pairs


def load_data(config: TrainConfig, given: TrainVal | None = None) -> TrainVal:
    """Training and validation pairs of a run: the given ones, or those in the options.

    Raises:
        ConfigError: if streaming lacks an option that it needs, or has one that it cannot follow; or options name
            pairs although some are given.
        DataError: if a source or row is bad, or prompts overlap and that is not allowed.
    """
    if given is not None:
        _require_pairs(given, config.data)
        return given
    if config.data.streaming == Streaming.off:
        return load_training_data(config.data)
    return stream_pairs(config.data, config.training.max_steps)


def _require_pairs(data: TrainVal, config: DataConfig) -> None:
    """Refuse pairs in memory that are empty, that overlap, or that the options name too."""
    if not isinstance(data, TrainVal) or not all(isinstance(x, PreferenceDataset) for x in (data.train, data.val)):
        raise TypeError("data must be a TrainVal of two PreferenceDatasets; PreferenceDataset.from_pairs makes one")
    for option, is_set in (
        ("data.train", config.train is not None),
        ("data.val", config.val is not None),
        ("data.max_pairs", config.max_pairs is not None),
        ("data.streaming", config.streaming != Streaming.off),
    ):
        if is_set:
            raise ConfigError(f"train_reward_model(data=…) gives the run's pairs, so {option} must not be set")
    for name, split in (("training", data.train), ("validation", data.val)):
        if not len(split):
            raise DataError(f"train_reward_model(data=…) needs {name} pairs, got none")
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
    return kind(
        data,
        config=config.data,
        batching=config.batching,
        seed=config.seed,
        epochs=config.training.epochs,
        max_steps=config.training.max_steps,
        model=model,
        pin_memory=config.hardware.pin_memory,
        order=order,
    )
