"""Macro-batches by step, and their loading in this process or in worker processes with a timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from rm_optimizer.core.tokens.batching import BatchShape, MacroBatch, PairCollator, pair_collator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer, renderer_of
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import DataError, DataStalled
from rm_optimizer.records.orders import PairOrder, epoch_order

_log = logging.getLogger("rm_optimizer")


class MacroBatches(Dataset[MacroBatch]):
    """Endless macro-batches by optimizer step; item k is always the same.

    Epoch e visits the pairs in the order `epoch_order(…, seed, e)`, or as `order` says, `batch_size` at a time. Its
    last macro-batch may be short and is never dropped. Items do not depend on earlier ones, so a run resumes at step k
    with item k.

    Args:
        collator: collator that makes the tensors.
        shape: division into macro-batches, ranks and micro-batches; the mean weight is the data's.
        seed: seed of the order, not negative.
        order: order of the pairs; None shuffles them by the seed.

    Raises:
        ValueError: if an epoch of `order` has another number of positions than there are pairs.
        DataError: if there is no pair to train on.
    """

    def __init__(self, collator: PairCollator, shape: BatchShape, *, seed: int, order: PairOrder | None = None) -> None:
        if not len(collator.tokenized):
            raise DataError("no pair is left to train on: each one's two responses are identical after tokenizing")
        self.collator = collator
        self.shape = replace(shape, mean_weight=collator.mean_weight)
        self.seed = seed
        self.order = order
        self._epoch = (0, self._visited(0))

    @property
    def steps_per_epoch(self) -> int:
        """Number of macro-batches of one epoch, including a short last one."""
        return -(-len(self.collator.tokenized) // self.shape.batch_size)

    def __getitem__(self, step: int) -> MacroBatch:
        """This rank's share of the macro-batch of one optimizer step."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._visited(epoch))
        size = self.shape.batch_size
        return self.shape.macro_batch(self.collator, self._epoch[1][batch * size : (batch + 1) * size], step)

    def _visited(self, epoch: int) -> NDArray[np.int64]:
        """Positions, among the tokenized pairs, that an epoch visits; pairs that tokenization dropped are left out."""
        kept = self.collator.tokenized.pair_index
        if self.order is None:
            return epoch_order(len(kept), self.seed, epoch)
        given = np.asarray(self.order.positions(epoch), dtype=np.int64)
        places: NDArray[np.int64] = np.searchsorted(kept, given)
        # A position beyond the last kept one gives len(kept), which "clip" makes an index; the comparison drops it.
        places = places[kept.take(places, mode="clip") == given]
        name, num_given = f"order {self.order.name!r}", self.collator.num_given
        if len(outside := given[(given < 0) | (given >= num_given)]):
            raise ValueError(f"positions of {name} must lie in [0, {num_given}), got {outside[0]} in epoch {epoch}")
        if len(places) != len(kept):
            raise ValueError(
                f"{name} must visit {len(kept)} pairs an epoch, as many as are trained on, got {len(places)} in epoch "
                f"{epoch}, without those that are equal after truncation; make it a permutation, or remove those pairs"
            )
        return places


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
        self,
        batches: MacroBatches,
        steps: range | Sampler[int],
        *,
        num_workers: int,
        fetch_timeout: float,
        pin_memory: bool = False,
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


class StepLoader:
    """The macro-batches of a run, with the state that Lightning saves and restores.

    Its length is the run's, so that step numbers continue after a resume.

    Args:
        load: function that loads the macro-batches from a step to before another.
        num_steps: optimizer steps of the run.
    """

    def __init__(self, load: Callable[[int, int], Iterator[MacroBatch]], num_steps: int) -> None:
        self._load, self._num_steps = load, num_steps
        self._start = self.step = 0

    def __len__(self) -> int:
        """Optimizer steps of the whole run."""
        return self._num_steps

    def __iter__(self) -> Iterator[MacroBatch]:
        """Macro-batches from the loader's present step on."""
        self.step = self._start
        for batch in self._load(self._start, self._num_steps):
            self.step = batch.step + 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The number of steps taken."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the steps taken."""
        self._start = state["step"]


class PairLoader(MacroBatchLoader):
    """A data loader over one pass of pairs an iteration; each further iteration is shuffled anew.

    Args:
        data: the pairs.
        renderer: rendering that makes their token ids.
        batches: their batches by step.
        num_workers: number of loading processes; 0 loads in this process.
        pin_memory: True to put the tensors into page-locked memory.
    """

    def __init__(
        self,
        data: PreferenceDataset,
        renderer: ConversationRenderer,
        batches: MacroBatches,
        *,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.steps = _Epoch(batches.steps_per_epoch)
        super().__init__(batches, self.steps, num_workers=num_workers, fetch_timeout=60.0, pin_memory=pin_memory)
        self.pairs, self.renderer = data.pairs, renderer

    def __repr__(self) -> str:
        return f"PairLoader({len(self.pairs):,} pairs in {len(self):,} batches)"

    def __iter__(self) -> Iterator[MacroBatch]:  # type: ignore[override]
        """The batches of the next epoch."""
        self.steps.number += 1
        yield from super().__iter__()


class _Epoch(Sampler[int]):
    """The steps of one epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.number = length, -1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number * self.length, (self.number + 1) * self.length))

    def __len__(self) -> int:
        return self.length


def _as_given(positions: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    return positions


def create_dataloader(
    data: object,
    tokenizer: object,
    batch_size: int = 32,
    *,
    shuffle: bool = True,
    max_length: int | None = None,
    micro_token_budget: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefix_sharing: bool = False,
    cache_dir: Path | None = None,
) -> PairLoader:
    """Tokenize pairs, or open their cache, and load one pass over them in batches of whole pairs.

    A batch holds its tensors by name, such as `batch["chosen_input_ids"]`, padded to its longest sequence. The last
    batch may be short and is never dropped.

    Args:
        data: pairs, or where to read them, as `PreferenceDataset` takes it.
        tokenizer: a `BradleyTerryRM`, its tokenizer, or another `transformers` tokenizer.
        batch_size: number of pairs of a batch.
        shuffle: True for an order of each epoch by the seed, False for the order of the data.
        max_length: most tokens of a sequence; None is the model's, or what the tokenizer states, at most 1024.
        micro_token_budget: most tokens of a micro-batch, padding included, in which a batch comes; None is one piece.
        seed: seed of the order, not negative.
        num_workers: number of loading processes; 0 loads in this process.
        pin_memory: True to put the tensors into page-locked memory.
        prefix_sharing: True for micro-batches that hold the start of a pair once; its model must support it.
        cache_dir: folder of tokenized data; None means the user's cache folder.

    Raises:
        ValueError: if a number is out of its range.
        DataError: if a source cannot be read, a row is bad, no pair is left after tokenization, or the chat template
            refuses one.
        TypeError: if `data`, `tokenizer` or `batch_size` is of another type.
    """
    if not isinstance(batch_size, int):
        raise TypeError(f"batch_size must be a whole number, got {type(batch_size).__name__}")
    renderer = renderer_of(tokenizer, max_length)
    dataset = PreferenceDataset(data).accepted_by(renderer)
    tokenized = tokenize_pairs(dataset.pairs, renderer, cache_dir)
    if dropped := tokenized.report.num_identical_dropped:
        _log.warning("%d of %d pairs are left out: equal after truncation", dropped, len(dataset))
    collator = pair_collator(tokenized, dataset.pairs, renderer.pad_token_id, prefix_sharing=prefix_sharing)
    shape = BatchShape(batch_size, micro_token_budget or 2 * batch_size * renderer.max_length)
    order = None if shuffle else PairOrder("as given", partial(_as_given, tokenized.pair_index))
    batches = MacroBatches(collator, shape, seed=seed, order=order)
    return PairLoader(dataset, renderer, batches, num_workers=num_workers, pin_memory=pin_memory)
