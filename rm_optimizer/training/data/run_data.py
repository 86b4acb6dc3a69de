"""Pairs of a run: loading, order of training, and the data module."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.orders import BINS, CurriculumSampler, PairOrder
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.readers import read_rows
from rm_optimizer.core.tokens.dataset import (
    PreferenceDataset,
    TrainVal,
    load_pairs,
    load_training_data,
    require_disjoint_prompts,
    split_off,
)
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.schema.data import OWN_MARGINS, Streaming
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.streamed import StreamedTrainVal, StreamingDataModule, stream_pairs


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
            a model are those of `chosen` over `rejected`; one against the label, or of a tie, counts as 0, the hardest.
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

    def refuse(number: int, reason: str) -> NoReturn:
        raise DataError(f"{path}, line {number}: {reason}")

    found: dict[str, float] = {}
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
    """Margin of the preferred response over the other, from that of `chosen` over `rejected`; 0 for a tie."""
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
        return given
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
