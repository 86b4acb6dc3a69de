"""Tokenized pairs of one run, in batches that depend only on the seed and the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import pair_fingerprints
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.batching import BatchShape, MacroBatch, pair_collator
from rm_optimizer.core.tokens.cache import TokenizedPairs, tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.loader import MacroBatches, MacroBatchLoader, StepLoader
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import ConversationRefused, DataError
from rm_optimizer.evaluation.pair_rewards import PairRewards, score_pairs, shares_prefixes
from rm_optimizer.records.orders import PairOrder
from rm_optimizer.schema import TrainConfig

log = logging.getLogger("rm_optimizer")

FEW_PAIRS = 10
"""Number of pairs of a split below which a warning is logged."""


class PreferenceDataModule(pl.LightningDataModule):
    """Training and validation pairs of a run.

    Args:
        data: the pairs of both splits.
        config: options of the run. The data order depends on its seed and on the step alone.
        model: model that renders conversations and determines if prompts can be shared.
        order: order of the training pairs; None shuffles them by the seed.

    Raises:
        DataError: if a split has no pair left after truncation, or a row that the chat template refuses is not to be
            dropped.
        ValueError: if the order does not fit the pairs.

    Attributes:
        data: the pairs of both splits that can be rendered.
    """

    holds_all_pairs = True
    """False if `data.train` holds only the first of the training pairs."""

    def __init__(
        self, data: TrainVal, config: TrainConfig, model: BradleyTerryRM, order: PairOrder | None = None
    ) -> None:
        super().__init__()
        self.config, self.batching, self.seed, self.order = config.data, config.batching, config.seed, order
        self.pin_memory = config.hardware.pin_memory
        training, batching, renderer = config.training, config.batching, model.renderer
        cache = Path(config.data.cache_dir) if config.data.cache_dir else None
        train, self.train_tokens = _tokenized("training", data.train, renderer, cache)
        val, self.val_tokens = _tokenized("validation", data.val, renderer, cache)
        self.data = replace(data, train=train, val=val)
        self.shares_prefixes = shares_prefixes(model, self.train_tokens, batching.prefix_sharing)
        self._collator = pair_collator(
            self.train_tokens, train, renderer.pad_token_id, prefix_sharing=self.shares_prefixes
        )
        self._warn_of_little()
        if order is not None:
            self._require_fitting(len(data.train))
        self.steps_per_epoch = math.ceil(len(self.train_tokens) / batching.batch_size)
        self.num_steps = training.max_steps or max(1, math.ceil(training.epochs * self.steps_per_epoch - 1e-9))

    def _require_fitting(self, num_given: int) -> None:
        """Refuse an order that does not fit the pairs, before the first step."""
        if len(self.data.train) != num_given:
            raise DataError(
                "an order needs every training pair, but some are left out: the chat template refuses them, or they "
                "are too long and data.over_long=drop; remove them from the data"
            )
        num_dropped = num_given - len(self.train_tokens)
        if num_dropped and self.config.curriculum is not None and not self.config.curriculum_covers:
            raise DataError(
                f"{num_dropped} training pairs are equal after truncation, so data.curriculum_covers=false cannot "
                "count its pairs; set it to true, remove those pairs, or raise model.max_length"
            )
        self.macro_batches()

    def _warn_of_little(self) -> None:
        """Warn if there are too few pairs to train on or to measure with, or every label is a tie."""
        train, val, batch_size = len(self.train_tokens), len(self.val_tokens), self.batching.batch_size
        if self.holds_all_pairs and train < FEW_PAIRS:
            log.warning("training has %s; a reward model cannot be learned from so few", _counted(train))
        if self.holds_all_pairs and batch_size > train:
            text = "batching.batch_size=%d is more than the %d training pairs; each step takes all of them"
            log.warning(text, batch_size, train)
        if val < FEW_PAIRS:
            text = "validation has %s, which measures next to nothing; raise data.val_fraction or set data.val"
            log.warning(text, _counted(val))
        for split, data in (("training", self.data.train), ("validation", self.data.val)):
            if all(pair.label == 0.5 for pair in data.pairs):
                text = "every %s pair is labeled 0.5, a tie: no response is the better one, and no accuracy is defined"
                log.warning(text, split)

    @property
    def pairs_a_step(self) -> int:
        """Pairs of an optimizer step, in all processes."""
        return min(self.batching.batch_size, len(self.train_tokens))

    def train_dataloader(self) -> StepLoader:
        """The run's macro-batches, one an optimizer step."""
        return StepLoader(self.steps, self.num_steps)

    def steps(self, start_step: int, num_steps: int) -> Iterator[MacroBatch]:
        """Macro-batches of steps `start_step` to `num_steps`, this rank's share of each."""
        loader = MacroBatchLoader(
            self.macro_batches(),
            range(start_step, num_steps),
            num_workers=self.config.num_workers,
            fetch_timeout=self.config.fetch_timeout,
            pin_memory=self.pin_memory,
        )
        return iter(loader)

    def macro_batches(self) -> MacroBatches:
        """This rank's share of each step, packed in this process."""
        return MacroBatches(self._collator, self.batch_shape, seed=self.seed, order=self.order)

    @property
    def batch_shape(self) -> BatchShape:
        """Division of a step's pairs into ranks and micro-batches."""
        trainer, options = self.trainer, self.batching
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return BatchShape(options.batch_size, options.micro_token_budget, rank, world_size, self._collator.mean_weight)

    def score_validation(self, model: BradleyTerryRM, **options: Any) -> PairRewards:
        """Rewards of the validation pairs; `options` are further arguments of `score_pairs`."""
        options |= {"token_budget": self.batching.eval_token_budget, "prefix_sharing": self.shares_prefixes}
        return score_pairs(model, self.val_tokens, self.data.val, **options)

    def pair_ids(self, pair_index: np.ndarray) -> list[str]:
        """Ids of training pairs."""
        return [self.data.train[int(index)].pair_id for index in pair_index]

    @property
    def num_train_pairs(self) -> int:
        """Training pairs after truncation."""
        return len(self.train_tokens)

    @property
    def skipped(self) -> Sequence[SkippedRow]:
        """Rows of both splits that gave no pair."""
        return [*self.data.train.skipped, *self.data.val.skipped]

    @property
    def num_skipped(self) -> int:
        """Number of rows that gave no pair."""
        return len(self.skipped)

    def trained_pairs(self) -> TrainedPairs:
        """Fingerprints of the training pairs, to be kept with the model."""
        return TrainedPairs.of(pair_fingerprints(self.data.train.pairs))

    def truncation(self) -> dict[str, Any]:
        """Token and truncation counts of both splits."""
        return {"train": asdict(self.train_tokens.report), "val": asdict(self.val_tokens.report)}


def _counted(pairs: int) -> str:
    return f"{pairs} pair" + ("" if pairs == 1 else "s")


def _tokenized(
    split: str, dataset: PreferenceDataset, renderer: ConversationRenderer, cache: Path | None
) -> tuple[PreferenceDataset, TokenizedPairs]:
    """The pairs that can be rendered, and their tokens."""
    try:
        tokens = tokenize_pairs(dataset.pairs, renderer, cache)
    except ConversationRefused:  # the search for all takes as long as rendering, so it comes after a failure only
        dataset = dataset.accepted_by(renderer)
        tokens = tokenize_pairs(dataset.pairs, renderer, cache)
    fitting = dataset.fitting(renderer, tokens.num_cut)
    if fitting is not dataset:
        dataset, tokens = fitting, tokenize_pairs(fitting.pairs, renderer, cache)
    if len(tokens) == 0:
        raise DataError(
            f"no {split} pair is left of {len(dataset)}: the two responses of each are equal after truncation "
            f"to model.max_length={renderer.max_length} tokens; raise it"
        )
    cut = tokens.report
    if cut.num_prompt_cut or cut.num_response_cut or cut.num_identical_dropped:
        log.info(
            "%s: of %d pairs, %d lose prompt tokens at model.max_length=%d (%d more on one side than on the other), "
            "%d response tokens; %d have equal sequences and %s",
            split,
            cut.num_pairs,
            cut.num_prompt_cut,
            cut.max_length,
            cut.num_uneven_prompt_cut,
            cut.num_response_cut,
            cut.num_identical_dropped,
            "are dropped" if split == "training" else "count as ties",
        )
    return dataset, tokens
