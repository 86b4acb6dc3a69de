"""Pairs to tensors: token-budget micro-batches, step-indexed macro-batches, and the loaders over them.

One optimizer step takes a macro-batch of `batch_size` pairs, whatever the number of ranks. Each rank takes a share of
it in micro-batches that hold whole pairs within a token budget. A loss that weights every pair by
``weight / MacroBatch.total_weight`` and sums over micro-batches and ranks is exact for every budget and rank count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rm_optimizer.core.base import PreferencePair
from rm_optimizer.core.chat import ConversationRenderer
from rm_optimizer.core.tokens import TokenizedPairs, tokenize_pairs
from rm_optimizer.errors import DataError, DataStalled


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Pairs as tensors, interleaved: row ``2 i`` is pair i's chosen response, row ``2 i + 1`` its rejected one.

    Args:
        input_ids: token ids, padded on the right.
        attention_mask: 1 for a token, 0 for padding.
        margin: the pairs' margins in the source's units, float32, 0 where a pair has none.
        label: probability that chosen is the better one, float32.
        weight: how many pairs each one counts for, float32.
        pair_index: positions in the data set, int64.
    """

    input_ids: Int[Tensor, "sequences tokens"]
    attention_mask: Int[Tensor, "sequences tokens"]
    margin: Float[Tensor, " pairs"]
    label: Float[Tensor, " pairs"]
    weight: Float[Tensor, " pairs"]
    pair_index: Int[Tensor, " pairs"]

    @property
    def num_pairs(self) -> int:
        """Pairs in the batch, half its rows."""
        return int(self.pair_index.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.attention_mask.sum())

    @property
    def num_padded_tokens(self) -> int:
        """Tokens with padding: rows times width."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PairBatch:
        """The batch on a device."""
        return PairBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in vars(self).values()))

    def pin_memory(self) -> PairBatch:
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return PairBatch(*(tensor.pin_memory() for tensor in vars(self).values()))

    def split(self, rewards: Float[Tensor, " sequences"]) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Rewards of the chosen and of the rejected responses.

        Raises:
            ValueError: if there is not exactly one reward per row.
        """
        if rewards.shape != (2 * self.num_pairs,):
            raise ValueError(f"rewards must have shape ({2 * self.num_pairs},), got {tuple(rewards.shape)}")
        return rewards[0::2], rewards[1::2]


@dataclass(frozen=True, eq=False)
class MacroBatch:
    """One rank's share of the pairs of one optimizer step.

    Args:
        step: the optimizer step, from 0.
        micro: this rank's micro-batches. Ranks may hold different numbers of them, and a rank holds none when a short
            last batch has fewer pairs than there are ranks; it must still take part in the gradients' reduction.
        total_weight: sum of the pair weights of the whole macro-batch, over all ranks.
        pair_index: positions in the data set of the whole macro-batch, over all ranks.
    """

    step: int
    micro: tuple[PairBatch, ...]
    total_weight: float
    pair_index: NDArray[np.int64]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MacroBatch:
        """The micro-batches on a device."""
        return replace(self, micro=tuple(batch.to(device, non_blocking) for batch in self.micro))

    def pin_memory(self) -> MacroBatch:
        """The micro-batches in page-locked memory."""
        return replace(self, micro=tuple(batch.pin_memory() for batch in self.micro))


def length_batches(lengths: Sequence[int] | NDArray[np.integer], token_budget: int) -> list[list[int]]:
    """Indices of the sequences in batches of like length, longest first.

    Within a batch, ``sequences x longest <= token_budget``; a sequence longer than the budget stands alone. Memory thus
    peaks at the first batch. O(n log n).

    Raises:
        ValueError: if the budget is not positive.

    Example:
        >>> length_batches([3, 9, 4, 3], token_budget=9)
        [[1], [2, 0], [3]]
    """
    return _packed(np.asarray(lengths, dtype=np.int64), token_budget)


def micro_batches(
    lengths: NDArray[np.integer], indices: Sequence[int] | NDArray[np.int64], token_budget: int
) -> list[list[int]]:
    """The given pairs in batches of like length, longest first, without ever splitting a pair.

    Within a batch, ``2 x pairs x longest <= token_budget``; a pair longer than the budget stands alone. `indices` are
    rows of `lengths`, which holds the tokens of all chosen and rejected sequences, shape (all pairs, 2). O(n log n).

    Raises:
        ValueError: if the budget is not positive.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    widths = 2 * lengths[chosen].max(axis=1).astype(np.int64)
    return [chosen[batch].tolist() for batch in _packed(widths, token_budget)]


def _packed(widths: NDArray[np.int64], token_budget: int) -> list[list[int]]:
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    order = np.argsort(-widths, kind="stable")
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        size = max(1, token_budget // max(1, int(widths[order[start]])))
        batches.append(order[start : start + size].tolist())
        start += size
    return batches


def pad_sequences(
    ids: Sequence[Sequence[int] | NDArray[np.int32]], pad_token_id: int
) -> tuple[Int[Tensor, "sequences tokens"], Int[Tensor, "sequences tokens"]]:
    """Input ids and attention mask of the sequences, padded on the right to the longest."""
    lengths = np.fromiter((len(row) for row in ids), dtype=np.int64, count=len(ids))
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    padded = np.full(mask.shape, pad_token_id, dtype=np.int64)
    for row, sequence in zip(padded, ids, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(padded), torch.from_numpy(mask.astype(np.int64))


def epoch_order(num_pairs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the pairs in one epoch, a pure function of its arguments.

    Positions are sorted by raw 64-bit PCG64 words seeded with ``(seed, epoch)``, neither negative. NumPy promises the
    raw stream, unlike `Generator.permutation`, to stay the same from version to version (NEP 19).
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_pairs)
    return np.argsort(words, kind="stable")


def rank_share(
    lengths: NDArray[np.integer], indices: NDArray[np.int64], rank: int, world_size: int
) -> NDArray[np.int64]:
    """The pairs of a macro-batch that one rank takes; the shares are disjoint, complete and near equal in tokens.

    Longest pair first, each to the rank with the fewest tokens so far (Graham's LPT rule, 1969: at most 4/3 of the
    best). `indices` are the macro-batch's pairs, as rows of `lengths`, which has shape (all pairs, 2).
    """
    if world_size == 1:
        return indices
    tokens = lengths[indices].sum(axis=1)
    loads = [(0, r) for r in range(world_size)]
    share: list[int] = []
    for position in np.argsort(-tokens, kind="stable").tolist():
        load, least = loads[0]
        heapq.heapreplace(loads, (load + int(tokens[position]), least))
        if least == rank:
            share.append(position)
    return indices[np.asarray(share, dtype=np.int64)]


class PairCollator:
    """Makes a `PairBatch` of any tokenised pairs, with the margins, labels and weights of the pairs they came from."""

    def __init__(self, tokenized: TokenizedPairs, pairs: Sequence[PreferencePair], pad_token_id: int) -> None:
        self.tokenized = tokenized
        self.pad_token_id = pad_token_id
        kept = [pairs[int(i)] for i in tokenized.pair_index]
        self.margin = np.array([pair.margin or 0.0 for pair in kept], dtype=np.float32)
        self.label = np.array([pair.label for pair in kept], dtype=np.float32)
        self.weight = np.array([pair.weight for pair in kept], dtype=np.float32)

    def __call__(self, positions: Sequence[int]) -> PairBatch:
        """The batch of the tokenised pairs at these positions, in this order."""
        sides = (self.tokenized.chosen, self.tokenized.rejected)
        input_ids, attention_mask = pad_sequences([side(i) for i in positions for side in sides], self.pad_token_id)
        rows = np.asarray(positions, dtype=np.int64)
        columns = (self.margin, self.label, self.weight, self.tokenized.pair_index)
        return PairBatch(input_ids, attention_mask, *(torch.from_numpy(column[rows]) for column in columns))


class MacroBatches(Dataset[MacroBatch]):
    """Macro-batches by optimizer step, without end: item k is the same whenever and wherever it is asked for.

    Epoch e visits the pairs in `epoch_order(…, seed, e)`, `batch_size` at a time; its last macro-batch may be short and
    is never dropped. Nothing is remembered between steps, so a run resumes at step k by asking for item k.

    Args:
        collator: makes the tensors.
        batch_size: pairs of a macro-batch, over all ranks.
        micro_token_budget: tokens of a micro-batch, padding included.
        seed: seed of the order, not negative.
        rank: whose share to give, in [0, world_size).
        world_size: number of ranks.

    Raises:
        ValueError: if a number is out of its range.
        DataError: if there is no pair to train on.
    """

    def __init__(
        self,
        collator: PairCollator,
        *,
        batch_size: int,
        micro_token_budget: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check(batch_size >= 1, "batch_size must be at least 1", batch_size)
        _check(0 <= rank < world_size, f"rank must lie in [0, {world_size})", rank)
        if not len(collator.tokenized):
            raise DataError("no pair is left to train on: each one's two responses are identical after tokenising")
        self.collator = collator
        self.batch_size = batch_size
        self.micro_token_budget = micro_token_budget
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Macro-batches of one epoch, a short last one included."""
        return -(-len(self.collator.tokenized) // self.batch_size)

    def __getitem__(self, step: int) -> MacroBatch:
        """This rank's share of the macro-batch of one optimizer step."""
        positions = self._positions(step)
        lengths = self.collator.tokenized.lengths
        share = rank_share(lengths, positions, self.rank, self.world_size)
        return MacroBatch(
            step=step,
            micro=tuple(map(self.collator, micro_batches(lengths, share, self.micro_token_budget))),
            total_weight=float(self.collator.weight[positions].sum(dtype=np.float64)),
            pair_index=self.collator.tokenized.pair_index[positions],
        )

    def _positions(self, step: int) -> NDArray[np.int64]:
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self.collator.tokenized), self.seed, epoch))
        return self._order[1][batch * self.batch_size : (batch + 1) * self.batch_size]


class MacroBatchLoader(DataLoader[MacroBatch]):
    """A data loader over `MacroBatches` that raises, rather than hangs, when a worker process stalls.

    A batch fetched without workers (`num_workers=0`) is not timed: nothing is left to interrupt it.
    """

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
                # Workers take the steps in turn, and batches come in order.
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
) -> DataLoader[MacroBatch]:
    """Tokenise the pairs, or open their cache, and load them as macro-batches of whole pairs.

    Args:
        dataset: the pairs.
        renderer: makes their token ids.
        batch_size: pairs of a macro-batch, over all ranks.
        micro_token_budget: tokens of a micro-batch, padding included.
        seed: seed of the order, not negative.
        epochs: passes over the pairs, a fraction allowed, rounded up to whole steps; or give `num_steps`.
        num_steps: optimizer steps of the run; or give `epochs`.
        start_step: first step to load, when a run resumes.
        rank: whose share to load, in [0, world_size).
        world_size: number of ranks.
        num_workers: loading processes; 0 loads in this one.
        fetch_timeout: seconds a worker may take for one macro-batch.
        cache_dir: folder of tokenised data; None is the user's cache folder.
        pin_memory: put the tensors into page-locked memory.

    Raises:
        ValueError: if not exactly one of `epochs` and `num_steps` is given, or a number is out of its range.
        DataError: if no pair is left after tokenising, or the chat template refuses one.
    """
    if (epochs is None) == (num_steps is None):
        raise ValueError(f"give either epochs or num_steps, got epochs={epochs} and num_steps={num_steps}")
    tokenized = tokenize_pairs(dataset, renderer, cache_dir)
    batches = MacroBatches(
        PairCollator(tokenized, dataset, renderer.pad_token_id),
        batch_size=batch_size,
        micro_token_budget=micro_token_budget,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    if epochs is not None:
        num_steps = math.ceil(round(epochs * batches.steps_per_epoch, 6))  # 0.1 x 30 is 3 steps, not 4
    return MacroBatchLoader(
        batches,
        batch_size=None,
        sampler=range(start_step, num_steps or 0),
        num_workers=num_workers,
        timeout=fetch_timeout if num_workers else 0,
        pin_memory=pin_memory,
    )


def evaluation_batches(
    tokenized: TokenizedPairs,
    pairs: Sequence[PreferencePair],
    *,
    pad_token_id: int,
    token_budget: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[PairBatch]:
    """Every pair once, in batches of like length, longest first, for scoring.

    The batches, of at most `token_budget` tokens with padding, are the same for every number of ranks. Ranks take them
    in turn: shares are disjoint and complete, and one rank may have a batch more than another.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check(0 <= rank < world_size, f"rank must lie in [0, {world_size})", rank)
    collator = PairCollator(tokenized, pairs, pad_token_id)
    batches = micro_batches(tokenized.lengths, np.arange(len(tokenized)), token_budget)
    return map(collator, batches[rank::world_size])


def _check(condition: bool, expected: str, got: int) -> None:
    if not condition:
        raise ValueError(f"{expected}, got {got}")
