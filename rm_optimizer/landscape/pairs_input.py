"""Fixed micro-batches from pairs or loaders of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, MacroBatch, PackedPairBatch, PairBatch
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.draws import FEWEST, Prompts, draw_pairs, require_enough

PairSource: TypeAlias = Sequence[PreferencePair] | Iterable[AnyPairBatch] | Iterable[MacroBatch]
"""Pairs, or a loader of batches or macro-batches of pairs that ends."""


def fixed_batches(
    model: BradleyTerryRM,
    source: PairSource,
    *,
    token_budget: int,
    num_pairs: int | None,
    seed: int,
    fewest: int = FEWEST,
) -> tuple[Sequence[AnyPairBatch], Prompts | None]:
    """All pairs of the source or a draw of them, in micro-batches, with their prompts if the source has them.

    Args:
        model: model that tokenizes the pairs.
        source: pairs, or a loader, whose batches are used unchanged.
        token_budget: most tokens, padding included, of a micro-batch that is made here.
        num_pairs: number of pairs to draw; None takes all. A loader allows None only.
        seed: seed of the draw.
        fewest: least number of pairs that must remain; 0 for a process whose share may be empty.

    Raises:
        ConfigError: if `num_pairs` is given for a loader.
        DataError: if fewer pairs remain.
    """
    if _are_pairs(source):
        pairs = [pair for pair in source if isinstance(pair, PreferencePair)]
        drawn = draw_pairs(model, pairs, num_pairs, seed, token_budget=token_budget, fewest=fewest)
        return drawn.batches, drawn.prompts
    if num_pairs is not None:
        raise ConfigError(
            "num_pairs draws from pairs, and a loader of batches was given; give pairs or a shorter loader"
        )
    batches = _of_loader(source)
    require_enough(sum(batch.num_pairs for batch in batches), fewest)
    return batches, None


def clusters_of(batches: Iterable[AnyPairBatch], prompts: Prompts | None) -> list[int] | None:
    """Number of each pair's prompt, in the order of the batches; None if the prompts are not known."""
    if prompts is None:
        return None
    return [prompts[index] for batch in batches for index in batch.pair_index.tolist()]


def _are_pairs(source: PairSource) -> bool:
    return isinstance(source, Sequence) and (len(source) == 0 or isinstance(source[0], PreferencePair))


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
