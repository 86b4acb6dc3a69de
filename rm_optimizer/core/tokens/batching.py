"""Pairs as tensors: micro-batches within a token budget, and macro-batches by optimizer step.

One optimizer step uses a macro-batch of `batch_size` pairs for any number of ranks. Each rank computes a share of it in
micro-batches of whole pairs within a token budget. A loss that weights every pair by
``weight / MacroBatch.total_weight`` and sums over micro-batches and ranks is exact for every budget and rank count.
The total weight is the number of pairs times the mean weight of the data set, and not the sum of the weights in the
step. So a pair of twice the weight counts twice at every batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.cache import PairTokens
from rm_optimizer.core.tokens.padding import PackedTrees, pack_trees, pad_sequences
from rm_optimizer.core.tokens.plan import length_batches, rank_share, row_batches
from rm_optimizer.core.tokens.prefix_trees import prefix_tree, shared_length


def need_not_wait(device: torch.device | str) -> bool:
    """True if the processor may go on while it copies to a device: it reads no result, and torch keeps the order.

    Apple's GPU would read memory that is no longer there, so Lightning waits for it too.
    """
    return torch.device(device).type not in ("cpu", "mps")


class _Pairs:
    """Common part of batches of pairs, whose fields can all move between devices."""

    pair_index: Int[Tensor, " pairs"]

    @property
    def num_pairs(self) -> int:
        """Number of pairs in the batch."""
        return int(self.pair_index.shape[0])

    def to(self, device: torch.device | str) -> Self:
        """The batch on a device; the processor does not wait for copies to an accelerator."""
        return type(self)(*(field.to(device, non_blocking=need_not_wait(device)) for field in vars(self).values()))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return type(self)(*(field.pin_memory() for field in vars(self).values()))

    def split(self, rewards: Float[Tensor, " sequences"]) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Rewards of the chosen and of the rejected responses.

        Raises:
            ValueError: if there are not exactly two rewards for each pair.
        """
        if rewards.shape != (2 * self.num_pairs,):
            raise ValueError(f"rewards must have shape ({2 * self.num_pairs},), got {tuple(rewards.shape)}")
        return rewards[0::2], rewards[1::2]


@dataclass(frozen=True, eq=False)
class PairBatch(_Pairs):
    """Pairs as tensors, interleaved: row ``2 i`` is pair i's chosen response, row ``2 i + 1`` its rejected one.

    Args:
        input_ids: token ids, padded on the right.
        attention_mask: 1 for a token, 0 for padding.
        margin: the pairs' margins in the source's units, float32, 0 for a pair without one.
        label: probability that chosen is the better one, float32.
        weight: number of pairs that each pair counts as, float32.
        pair_index: positions in the data set, int64.
        scores: scores of the chosen and the rejected response, float32, NaN for a pair without them.
    """

    input_ids: Int[Tensor, "sequences tokens"]
    attention_mask: Int[Tensor, "sequences tokens"]
    margin: Float[Tensor, " pairs"]
    label: Float[Tensor, " pairs"]
    weight: Float[Tensor, " pairs"]
    pair_index: Int[Tensor, " pairs"]
    scores: Float[Tensor, "pairs 2"]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], start: int = 0) -> PairBatch:
        """The batch of a mapping such as a `DataLoader` of a `PreferenceDataset` gives.

        Args:
            tensors: `chosen_input_ids`, `chosen_attention_mask` and the same of `rejected`; perhaps also `margin`,
                `label`, `weight` and `scores`, which are 0, 1, 1 and NaN otherwise.
            start: position of the first pair.

        Raises:
            KeyError: if one of the four tensors is missing.
        """
        sides = [(tensors[f"chosen_{name}"], tensors[f"rejected_{name}"]) for name in ("input_ids", "attention_mask")]
        rows = ([row for pair in zip(*both, strict=True) for row in pair] for both in sides)
        ids, mask = (pad_sequence(each, batch_first=True) for each in rows)
        ones = torch.ones(len(ids) // 2, device=ids.device)
        unknown = torch.full((len(ones), 2), torch.nan, device=ids.device)
        given = {"margin": 0 * ones, "label": ones, "weight": ones, "scores": unknown, **tensors}
        margin, label, weight, scores = (given[name].to(ones) for name in ("margin", "label", "weight", "scores"))
        index = torch.arange(start, start + len(ones), device=ids.device)
        return cls(ids, mask, margin, label, weight, index, scores)

    def halves(self) -> tuple[PairBatch, PairBatch] | None:
        """The first and the second half of the pairs; None for a single pair."""
        count, cut, fields = self.num_pairs, self.num_pairs // 2, vars(self).values()
        first, second = (
            PairBatch(*(field[start:stop] if len(field) == count else field[2 * start : 2 * stop] for field in fields))
            for start, stop in ((0, cut), (cut, count))
        )
        return (first, second) if cut else None

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.attention_mask.sum())

    @property
    def num_padded_tokens(self) -> int:
        """Tokens with padding: rows times width."""
        return self.input_ids.numel()

    @property
    def num_unique_tokens(self) -> int:
        """Tokens without padding, those that a pair's two sequences share at their start counted once."""
        chosen, rejected = self.input_ids[0::2], self.input_ids[1::2]
        shortest = self.attention_mask.sum(dim=1).view(-1, 2).amin(dim=1, keepdim=True)
        inside = torch.arange(self.input_ids.shape[1], device=shortest.device) < shortest - 1
        shared = ((chosen == rejected) & inside).long().cumprod(dim=1)
        return self.num_tokens - int(shared.sum())


@dataclass(frozen=True, eq=False)
class PackedPairBatch(_Pairs):
    """Pairs as trees of two branches: the common first tokens once, then the rests of the chosen and the rejected one.

    Args:
        trees: the tokens in rows; branches 2 i and 2 i + 1 belong to pair i's chosen and rejected sequence.
        margin, label, weight, pair_index, scores: values of the pairs, as in a `PairBatch`.
    """

    trees: PackedTrees
    margin: Float[Tensor, " pairs"]
    label: Float[Tensor, " pairs"]
    weight: Float[Tensor, " pairs"]
    pair_index: Int[Tensor, " pairs"]
    scores: Float[Tensor, "pairs 2"]

    def halves(self) -> tuple[PackedPairBatch, PackedPairBatch] | None:
        """The pairs in the first and in the second half of the rows; None for a single row."""
        count = len(self.trees.input_ids)
        cut = count // 2
        return (self._rows(0, cut), self._rows(cut, count)) if cut else None

    def _rows(self, start: int, stop: int) -> PackedPairBatch:
        trees, width = self.trees, self.trees.input_ids.shape[1]
        row, column = trees.last // width, trees.last % width
        inside = (start <= row) & (row < stop)
        part = PackedTrees(
            trees.input_ids[start:stop],
            trees.position_ids[start:stop],
            trees.end[start:stop],
            last=trees.last[inside] - start * width,
            num_tokens=sum(int(column[row == each].max()) + 1 for each in range(start, stop)),
            num_sequence_tokens=int((trees.position_ids.flatten()[trees.last[inside]] + 1).sum()),
        )
        values = (self.margin, self.label, self.weight, self.pair_index, self.scores)
        return PackedPairBatch(part, *(value[inside[::2]] for value in values))

    @property
    def num_tokens(self) -> int:
        """Tokens of the separate sequences, without padding."""
        return self.trees.num_sequence_tokens

    @property
    def num_padded_tokens(self) -> int:
        """Tokens with padding: rows times width."""
        return self.trees.num_padded_tokens

    @property
    def num_unique_tokens(self) -> int:
        """Tokens without padding, those that a pair's two sequences share at their start counted once."""
        return self.trees.num_tokens


AnyPairBatch: TypeAlias = PairBatch | PackedPairBatch
"""A micro-batch of either kind; `BradleyTerryRM.rewards_of` and `split` accept both."""


@dataclass(frozen=True, eq=False)
class MacroBatch:
    """One rank's share of the pairs of one optimizer step.

    Args:
        step: the optimizer step, from 0.
        micro: this rank's micro-batches. Ranks may have different numbers of them. A rank has none if a short last
            batch has fewer pairs than there are ranks, but it must still take part in the gradients' reduction.
        total_weight: number of pairs of the macro-batch, over all ranks, times the mean weight of the data set's pairs.
        pair_index: positions in the data set of the whole macro-batch, over all ranks.
    """

    step: int
    micro: tuple[AnyPairBatch, ...]
    total_weight: float
    pair_index: NDArray[np.int64]

    def keys(self) -> tuple[str, ...]:
        """Names that `batch[name]` takes: the ids and masks of both sides, and the values of the pairs."""
        sides = [f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "attention_mask")]
        return (*sides, "margin", "label", "weight", "pair_index")

    def __getitem__(self, name: str) -> Tensor:
        """One tensor of all pairs of this rank, padded on the right; masked ids are the pad token.

        It is no `collections.abc.Mapping`, which torch and Lightning would take apart and build anew.

        Raises:
            KeyError: if there is no such tensor.
            TypeError: if the micro-batches share the starts of pairs, so that no tensor holds the sides.
        """
        side, _, rest = name.partition("_")
        if name not in self.keys():
            raise KeyError(name)
        if rest not in ("input_ids", "attention_mask"):
            return torch.cat([getattr(batch, name) for batch in self.micro])
        parts = list[Tensor]()
        for batch in self.micro:
            if not isinstance(batch, PairBatch):
                raise TypeError(f"{name} needs batches without prefix_sharing, which hold the sides of a pair apart")
            parts += getattr(batch, rest)[side == "rejected" :: 2]
        return pad_sequence(parts, batch_first=True)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, for loops such as `{name: each.to(device) for name, each in batch.items()}`."""
        return ((name, self[name]) for name in self.keys())

    def to(self, device: torch.device | str) -> MacroBatch:
        """The micro-batches on a device."""
        return replace(self, micro=tuple(batch.to(device) for batch in self.micro))

    def pin_memory(self) -> MacroBatch:
        """The micro-batches in page-locked memory."""
        return replace(self, micro=tuple(batch.pin_memory() for batch in self.micro))


@dataclass(frozen=True, eq=False)
class PairValues:
    """The values of pairs apart from their tokens.

    Args:
        margin: margins in the source's units, 0 for a pair without one.
        label: probabilities that chosen is the better one.
        weight: number of pairs that each pair counts as.
        scores: scores of the chosen and the rejected response, NaN for a pair without them.
    """

    margin: Float32[np.ndarray, " pairs"]
    label: Float32[np.ndarray, " pairs"]
    weight: Float32[np.ndarray, " pairs"]
    scores: Float32[np.ndarray, "pairs 2"]

    @classmethod
    def of(cls, pairs: Iterable[PreferencePair]) -> PairValues:
        """The values of these pairs."""
        rows = [(pair.margin or 0.0, pair.label, pair.weight, *(pair.scores or (np.nan, np.nan))) for pair in pairs]
        columns = np.ascontiguousarray(np.array(rows, dtype=np.float32).reshape(-1, 5).T)
        margin, label, weight = columns[:3]
        return cls(margin, label, weight, np.ascontiguousarray(columns[3:].T))

    def take(self, positions: NDArray[np.int64] | NDArray[np.bool_]) -> PairValues:
        """The values of the pairs at these positions."""
        return PairValues(*(column[positions] for column in vars(self).values()))


class PairCollator:
    """Collator that makes a `PairBatch` of tokenized pairs.

    Args:
        tokenized: the pairs' tokens.
        pairs: all pairs before tokenization, or the values of each tokenized pair.
        pad_token_id: id that fills masked positions.
    """

    def __init__(self, tokenized: PairTokens, pairs: Sequence[PreferencePair] | PairValues, pad_token_id: int) -> None:
        self.tokenized = tokenized
        self.pad_token_id = pad_token_id
        kept = tokenized.pair_index.tolist()
        self.num_given = len(tokenized) if isinstance(pairs, PairValues) else len(pairs)
        values = pairs if isinstance(pairs, PairValues) else PairValues.of(pairs[i] for i in kept)
        self.margin, self.label, self.weight, self.scores = vars(values).values()

    @property
    def mean_weight(self) -> float:
        """Mean weight of all tokenized pairs."""
        return float(self.weight.mean(dtype=np.float64))

    def __call__(self, positions: Sequence[int]) -> AnyPairBatch:
        """The batch of the tokenized pairs at these positions, in this order."""
        sides = (self.tokenized.chosen, self.tokenized.rejected)
        input_ids, attention_mask = pad_sequences([side(i) for i in positions for side in sides], self.pad_token_id)
        return PairBatch(input_ids, attention_mask, *self._columns(positions))

    def tokens(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens to compute for each pair, without padding."""
        tokens: NDArray[np.int64] = self.tokenized.lengths[positions].sum(axis=1)
        return tokens

    def micro_batches(self, positions: NDArray[np.int64], token_budget: int) -> list[list[int]]:
        """The pairs in batches of at most `token_budget` tokens with padding, longest first, none split."""
        widths = 2 * self.tokenized.lengths[positions].max(axis=1)
        return [positions[batch].tolist() for batch in length_batches(widths, token_budget)]

    def _columns(self, positions: Sequence[int]) -> Iterator[Tensor]:
        rows = np.asarray(positions, dtype=np.int64)
        columns = (self.margin, self.label, self.weight, self.tokenized.pair_index, self.scores)
        return (torch.from_numpy(column[rows]) for column in columns)


class PackedPairCollator(PairCollator):
    """Collator that makes a `PackedPairBatch` of tokenized pairs, for models that support prefix sharing."""

    def __call__(self, positions: Sequence[int]) -> PackedPairBatch:
        """The batch of the tokenized pairs at these positions, in this order."""
        trees = [prefix_tree((self.tokenized.chosen(i), self.tokenized.rejected(i))) for i in positions]
        return PackedPairBatch(pack_trees(trees, pad_token_id=self.pad_token_id), *self._columns(positions))

    def tokens(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens to compute for each pair, with shared ones counted once."""
        chosen, rejected = self.tokenized.chosen, self.tokenized.rejected
        shared = [shared_length(chosen(i), rejected(i)) for i in positions.tolist()]
        return super().tokens(positions) - np.asarray(shared, dtype=np.int64)

    def micro_batches(self, positions: NDArray[np.int64], token_budget: int) -> list[list[int]]:
        """The pairs in batches of at most `token_budget` tokens with padding, widest first, none split."""
        return [positions[batch].tolist() for batch in row_batches(self.tokens(positions), token_budget)]


def pair_collator(
    tokenized: PairTokens, pairs: Sequence[PreferencePair] | PairValues, pad_token_id: int, *, prefix_sharing: bool
) -> PairCollator:
    """The collator for micro-batches with shared prompts, or for padded ones."""
    return (PackedPairCollator if prefix_sharing else PairCollator)(tokenized, pairs, pad_token_id)


@dataclass(frozen=True)
class BatchShape:
    """Division of pairs into macro-batches, and of these into ranks and micro-batches.

    Args:
        batch_size: pairs of a macro-batch, over all ranks.
        micro_token_budget: tokens of a micro-batch, padding included.
        rank: rank of the process.
        world_size: number of ranks.
        mean_weight: mean weight of the data set's pairs, as far as it is known.

    Raises:
        ValueError: if a number is out of its range.
    """

    batch_size: int
    micro_token_budget: int
    rank: int = 0
    world_size: int = 1
    mean_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        _require_rank(self.rank, self.world_size)

    def macro_batch(self, collator: PairCollator, positions: NDArray[np.int64], step: int) -> MacroBatch:
        """This rank's share of the macro-batch of the tokenized pairs at these positions."""
        share = positions
        if self.world_size > 1:
            share = rank_share(collator.tokens(positions), positions, self.rank, self.world_size)
        return MacroBatch(
            step=step,
            micro=tuple(map(collator, collator.micro_batches(share, self.micro_token_budget))),
            total_weight=len(positions) * self.mean_weight,
            pair_index=collator.tokenized.pair_index[positions],
        )


def evaluation_batches(
    collator: PairCollator, positions: NDArray[np.int64], token_budget: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[AnyPairBatch]:
    """Batches of the pairs at these positions of similar length for scoring, longest first.

    The batches have at most `token_budget` tokens with padding, and are the same for every number of ranks. They are
    dealt to the ranks in turn, so that a rank may have one batch more than another.

    Raises:
        ValueError: if a number is out of its range.
    """
    _require_rank(rank, world_size)
    return map(collator, collator.micro_batches(positions, token_budget)[rank::world_size])


def _require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, {world_size}), got {rank}")
