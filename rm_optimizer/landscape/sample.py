"""Measured loss: a model, its loss, and the fixed pairs of the average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.tokens.batching import AnyPairBatch, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import DataError
from rm_optimizer.landscape.identity import pairs_digest
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.landscape.pairs_input import Prompts, prompt_numbers
from rm_optimizer.schema import LossConfig


@dataclass(frozen=True)
class PairSample:
    """Pairs in micro-batches, the same for every evaluation.

    Args:
        batches: the pairs, each in one micro-batch.
        prompts: of the pairs.
        seed: of the draw.
        fingerprint: digest of the pairs as the loss sees them.
    """

    batches: tuple[AnyPairBatch, ...]
    prompts: Prompts
    seed: int
    fingerprint: str

    @property
    def num_pairs(self) -> int:
        """Pairs in all micro-batches."""
        return sum(batch.num_pairs for batch in self.batches)

    @property
    def num_prompts(self) -> int:
        """Different prompts among them."""
        return len(set(self.prompts.values()))


def draw_pairs(
    pairs: Sequence[PreferencePair],
    renderer: ConversationRenderer,
    *,
    num_pairs: int,
    seed: int,
    token_budget: int,
    cache_dir: Path | None = None,
) -> PairSample:
    """Draw pairs by a seed, as the training callback draws them, in padded micro-batches.

    Args:
        pairs: pairs to draw from.
        renderer: the model's.
        num_pairs: number of pairs to draw, at most all.
        seed: of the draw.
        token_budget: tokens of a micro-batch, padding included; bounds memory and changes no result.
        cache_dir: folder of the token cache; see `tokenize_pairs`.

    Raises:
        DataError: if fewer than two pairs are left after truncation: one pair gives no sampling error.
    """
    tokenized = tokenize_pairs(pairs, renderer, cache_dir)
    if min(num_pairs, len(tokenized)) < 2:
        raise DataError(
            f"the landscape needs at least 2 pairs to know its sampling error, got {min(num_pairs, len(tokenized))} "
            f"({len(pairs)} were read, {len(tokenized)} are left after truncation to {renderer.max_length} tokens)"
        )
    collator = PairCollator(tokenized, pairs, renderer.pad_token_id)
    drawn = random_positions(len(tokenized), num_pairs, seed)
    batches = collator.micro_batches(drawn, token_budget)
    chosen = sorted(int(tokenized.pair_index[position]) for position in drawn)
    prompts = prompt_numbers((index, pairs[index]) for index in chosen)
    collated = tuple(map(collator, batches))
    return PairSample(collated, prompts, seed, pairs_digest(collated))


@dataclass(frozen=True)
class MeasuredLoss:
    """Model at one point of weight space with its loss and pairs. Can be sent to other processes.

    Args:
        model: the reward model.
        sample: the pairs.
        loss: training loss.
        params: the parameters that may move; see `select_parameters`.
        dtype: type to compute in, float32 or float64.
    """

    model: BradleyTerryRM
    sample: PairSample
    loss: LossConfig
    params: str | tuple[str, ...] = TRAINABLE
    dtype: torch.dtype = torch.float32

    @contextmanager
    def measuring(self) -> Iterator[PairObjective]:
        """Objective over the pairs, with fixed weights and modes.

        Raises:
            ConfigError: if no parameter is selected, or the model cannot be differentiated twice.
        """
        with measuring(self.model, self.sample.batches, self.loss, params=self.params, dtype=self.dtype) as objective:
            yield objective

    def fingerprint(self) -> str:
        """Digest of everything that a measurement depends on: weights, pairs, loss, parameters and type."""
        weights = weights_digest(self.model)
        return digest([weights, self.sample.fingerprint, vars(self.loss), self.params, str(self.dtype)])
