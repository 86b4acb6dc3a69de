"""Loading of macro-batches by step, in this process or in worker processes with a timeout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from rm_optimizer.core.pairs.orders import PairOrder
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import MacroBatch, MacroBatches, pair_collator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import DataStalled


class MacroBatchLoader(DataLoader[MacroBatch]):
    """A data loader over `MacroBatches` that raises an error instead of hanging if a worker process stalls.

    Without workers (`num_workers=0`) there is no timeout, since no other process could interrupt the loading. The
    loader uses no global random generator, so that a further iteration, as in a resumed run, does not change one.

    Args:
        batches: the macro-batches by step.
        steps: the steps to load, in order.
        num_workers: number of loading processes; 0 loads in this process.
        fetch_timeout: most seconds of a worker for one macro-batch.
        pin_memory: True to put the tensors into page-locked memory.
    """

    def __init__(
        self, batches: MacroBatches, steps: range, *, num_workers: int, fetch_timeout: float, pin_memory: bool = False
    ) -> None:
        super().__init__(
            batches,
            batch_size=None,
            sampler=steps,
            num_workers=num_workers,
            timeout=fetch_timeout if num_workers else 0,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(batches.seed),  # for the workers' seeds
        )

    def __iter__(self) -> Iterator[MacroBatch]:  # type: ignore[override]
        """Macro-batches in the order of steps.

        Raises:
            DataStalled: if a worker does not deliver a macro-batch in time.
        """
        batches = super().__iter__()
        for count, step in enumerate(self.sampler):
            try:
                batch = next(batches)
            except RuntimeError as error:
                if "timed out after" not in str(error):
                    raise
                # The steps are dealt to the workers in turn, and batches come in order.
                worker = count % self.num_workers
                raise DataStalled(
                    f"data-loader worker {worker} did not deliver step {step} within {self.timeout:g} s; look for a "
                    "slow or lost disk, or raise data.fetch_timeout"
                ) from error
            yield batch


def create_dataloader(
    dataset: Sequence[PreferencePair],
    renderer: ConversationRenderer,
    *,
    batch_size: int,
    micro_token_budget: int,
    seed: int,
    epochs: float | None = None,
    num_steps: int | None = None,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    fetch_timeout: float = 60.0,
    cache_dir: Path | None = None,
    pin_memory: bool = False,
    prefix_sharing: bool = False,
    order: PairOrder | None = None,
) -> DataLoader[MacroBatch]:
    """Tokenize the pairs, or open their cache, and load them as macro-batches of whole pairs.

    Args:
        dataset: the pairs.
        renderer: renderer that makes their token ids.
        batch_size: number of pairs of a macro-batch, over all ranks.
        micro_token_budget: most tokens of a micro-batch, padding included.
        seed: seed of the order, not negative.
        epochs: number of passes over the pairs, perhaps a fraction, rounded up to whole steps; or give `num_steps`.
        num_steps: number of optimizer steps of the run; or give `epochs`.
        start_step: first step to load in a resumed run.
        rank: rank of the process, in [0, world_size).
        world_size: number of ranks.
        num_workers: number of loading processes; 0 loads in this process.
        fetch_timeout: most seconds of a worker for one macro-batch.
        cache_dir: folder of tokenized data; None means the user's cache folder.
        pin_memory: True to put the tensors into page-locked memory.
        prefix_sharing: True for `PackedPairBatch`es, False for `PairBatch`es.
        order: order of the pairs; None shuffles them by the seed.

    Raises:
        ValueError: if not exactly one of `epochs` and `num_steps` is given, or a number is out of its range.
        DataError: if no pair is left after tokenization, or the chat template refuses one.
    """
    if (epochs is None) == (num_steps is None):
        raise ValueError(f"give either epochs or num_steps, got epochs={epochs} and num_steps={num_steps}")
    tokenized = tokenize_pairs(dataset, renderer, cache_dir)
    batches = MacroBatches(
        pair_collator(tokenized, dataset, renderer.pad_token_id, prefix_sharing=prefix_sharing),
        batch_size=batch_size,
        micro_token_budget=micro_token_budget,
        seed=seed,
        rank=rank,
        world_size=world_size,
        order=order,
    )
    if epochs is not None:
        num_steps = math.ceil(round(epochs * batches.steps_per_epoch, 6))  # 0.1 x 30 is 3 steps, not 4
    steps = range(start_step, num_steps or 0)
    return MacroBatchLoader(batches, steps, num_workers=num_workers, fetch_timeout=fetch_timeout, pin_memory=pin_memory)
