"""Fixed micro-batches from pairs or loaders of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.orders import random_positions
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, MacroBatch, PackedPairBatch, PairBatch, pair_collator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.errors import ConfigError, DataError

PairSource: TypeAlias = Sequence[PreferencePair] | Iterable[AnyPairBatch] | Iterable[MacroBatch]
"""Pairs, or a loader of batches or macro-batches of pairs that ends."""
Prompts: TypeAlias = Mapping[int, int]
"""Number of each pair's prompt, by the pair's `pair_index`; pairs of one prompt are not independent."""
FEWEST = 2
"""Pairs below which curvature is that of one preference, not of a loss over preferences."""


def fixed_batches(
    model: BradleyTerryRM,
    source: PairSource,
    *,
    token_budget: int,
    num_pairs: int | None,
    seed: int,
    fewest: int = FEWEST,
) -> tuple[list[AnyPairBatch], Prompts | None]:
    """All pairs of the source, or some drawn once, in micro-batches, and their prompts if the source has them.

    Args:
        model: model that tokenizes the pairs.
        source: the pairs; batches of a loader are taken as they are.
        token_budget: tokens with padding of a micro-batch that is made here.
        num_pairs: pairs to draw; None takes all. Pairs of a loader are all taken.
        seed: of the draw.
        fewest: pairs that must be left; 0 for a process that may have a share of none.

    Raises:
        ConfigError: if pairs of a loader shall be drawn.
        DataError: if fewer pairs are left.
    """
    prompts: Prompts | None = None
    if _are_pairs(source):
        batches, prompts = _of_pairs(model, source, token_budget, num_pairs, seed)
    else:
        batches = _of_loader(source)
    if num_pairs is not None and not _are_pairs(source):
        raise ConfigError(
            "num_pairs draws from pairs, and a loader of batches was given; give pairs or a shorter loader"
        )
    count = sum(batch.num_pairs for batch in batches)
    if count < fewest:
        raise DataError(
            f"curvature of a loss over pairs needs at least {fewest} pairs, got {count}; 64 or more are useful"
        )
    return batches, prompts


def prompt_numbers(pairs: Iterable[tuple[int, PreferencePair]]) -> Prompts:
    """Number of each pair's prompt in the order in which prompts first come, from pairs with their `pair_index`."""
    numbers: dict[str, int] = {}
    return {index: numbers.setdefault(pair.prompt_id, len(numbers)) for index, pair in pairs}


def clusters_of(batches: Iterable[AnyPairBatch], prompts: Prompts | None) -> list[int] | None:
    """Number of each pair's prompt, in the order of the batches; None where the prompts are not known."""
    if prompts is None:
        return None
    return [prompts[index] for batch in batches for index in batch.pair_index.tolist()]


def _are_pairs(source: PairSource) -> bool:
    return isinstance(source, Sequence) and (len(source) == 0 or isinstance(source[0], PreferencePair))


def _of_pairs(
    model: BradleyTerryRM, source: PairSource, token_budget: int, num_pairs: int | None, seed: int
) -> tuple[list[AnyPairBatch], Prompts]:
    pairs = [pair for pair in source if isinstance(pair, PreferencePair)]
    if num_pairs is not None and num_pairs < len(pairs):
        drawn = random_positions(len(pairs), num_pairs, seed)
        pairs = [pairs[index] for index in drawn.tolist()]
    if not pairs:
        return [], {}
    tokens = tokenize_pairs(pairs, model.renderer, None)
    collator = pair_collator(tokens, pairs, model.renderer.pad_token_id, prefix_sharing=False)
    batches = [collator(batch) for batch in collator.micro_batches(np.arange(len(tokens)), token_budget)]
    return batches, prompt_numbers(enumerate(pairs))


def _of_loader(source: PairSource) -> list[AnyPairBatch]:
    batches: list[AnyPairBatch] = []
    for item in source:
        if isinstance(item, MacroBatch):
            batches += item.micro
        elif isinstance(item, PairBatch | PackedPairBatch):
            batches.append(item)
        else:
            raise DataError(f"a loader of pairs must give batches of pairs, got {type(item).__name__}")
    return batches
