"""Single pairs of micro-batches, and the identity of a loss over pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rm_optimizer.core.classifier.tree_masks import tree_mask
from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.tokens.batching import AnyPairBatch, PackedPairBatch, PairBatch
from rm_optimizer.landscape.operators.objective import PairObjective


def single_pairs(batch: AnyPairBatch) -> Iterator[PairBatch]:
    """Each pair of a micro-batch as one padded batch, without columns that hold only padding."""
    sequences = _sequences(batch)
    for index in range(batch.num_pairs):
        yield _padded(batch, sequences, [index])


def chosen_pairs(batch: AnyPairBatch, positions: Sequence[int]) -> PairBatch:
    """The pairs at those positions of a micro-batch as one padded batch."""
    return _padded(batch, _sequences(batch), positions)


def _padded(batch: AnyPairBatch, sequences: Sequence[Tensor], positions: Sequence[int]) -> PairBatch:
    rows = [sequences[row] for index in positions for row in (2 * index, 2 * index + 1)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows], device=ids.device)
    mask = (torch.arange(ids.shape[1], device=ids.device) < lengths).long()
    at = torch.tensor(positions, device=batch.weight.device)
    values = (batch.margin, batch.label, batch.weight, batch.pair_index, batch.scores)
    return PairBatch(ids, mask, *(value[at] for value in values))


def _sequences(batch: AnyPairBatch) -> list[Tensor]:
    """Tokens of each sequence; in a tree those that its last token attends to."""
    if not isinstance(batch, PackedPairBatch):
        return [ids[mask != 0] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    trees = batch.trees
    visible = tree_mask(trees)[:, 0]
    places = [divmod(place, trees.input_ids.shape[1]) for place in trees.last.tolist()]
    return [trees.input_ids[row][visible[row, column]] for row, column in places]


def pairs_digest(batches: Sequence[AnyPairBatch]) -> str:
    """Digest of each pair's tokens and values, independent of micro-batches, padding and layout."""
    singles = (single for batch in batches for single in single_pairs(batch))
    rows = [
        [
            *(single.pair_index.tolist() + single.margin.tolist() + single.label.tolist() + single.weight.tolist()),
            *(score for score in single.scores.flatten().tolist() if not math.isnan(score)),
            *(ids[mask != 0].tolist() for ids, mask in zip(single.input_ids, single.attention_mask, strict=True)),
        ]
        for single in singles
    ]
    return digest(sorted(rows))


def identity_of(objective: PairObjective) -> str:
    """Digest of everything that the loss and its derivatives depend on."""
    loss, dtype = vars(objective.loss), str(objective.dtype)
    pairs = pairs_digest(objective.batches)
    return digest([weights_digest(objective.model), pairs, objective.subset.names, loss, dtype])
