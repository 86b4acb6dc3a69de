"""Pairs of a run, and their batches, in memory or streamed as the options say."""

from __future__ import annotations

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import TrainVal, load_training_data
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.streamed import StreamedTrainVal, StreamingDataModule, stream_pairs


def load_data(config: TrainConfig) -> TrainVal:
    """Training and validation pairs of a run.

    Raises:
        ConfigError: if streaming lacks an option that it needs, or has one that it cannot follow.
        DataError: if a source or row is bad, or prompts overlap and that is not allowed.
    """
    if config.data.streaming == Streaming.off:
        return load_training_data(config.data)
    return stream_pairs(config.data, config.training.max_steps)


def data_module(data: TrainVal, config: TrainConfig, model: BradleyTerryRM) -> PreferenceDataModule:
    """Batches of the pairs that `load_data` returned.

    Raises:
        DataError: if a split has no pair left after truncation.
    """
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
    )
