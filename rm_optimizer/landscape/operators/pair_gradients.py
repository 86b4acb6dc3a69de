"""Gradients of single pairs, for about the cost of one gradient over all pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.classifier.tree_attention import tree_mask
from rm_optimizer.core.tokens.batching import AnyPairBatch, PackedPairBatch, PairBatch
from rm_optimizer.core.tokens.packed_trees import PackedTrees
from rm_optimizer.landscape.operators.base import OutputCurvature, fisher_factors, output_blocks
from rm_optimizer.landscape.operators.objective import PairObjective

_ROUNDING = 16
"""Bound in units of the rewards' precision; a smaller second eigenvalue of a pair's matrix is a rounded 0."""


def single_pairs(batch: AnyPairBatch) -> Iterator[PairBatch]:
    """Each pair of a micro-batch as a padded batch of its own, without columns that hold only padding."""
    sequences = _sequences(batch)
    for index in range(batch.num_pairs):
        yield _padded(batch, sequences, [index])


def chosen_pairs(batch: AnyPairBatch, positions: Sequence[int]) -> PairBatch:
    """The pairs at those positions of a micro-batch as one padded batch."""
    return _padded(batch, _sequences(batch), positions)


@dataclass(frozen=True)
class PairRows:
    """One pair's part of a matrix `J^T C J`, as rows whose outer products add up to it.

    With `C_i = sum_k c_k u_k u_k^T` for the pair's two rewards, the rows are `sqrt(c_k) J_i^T u_k`; a loss without
    regularizers has one, along the margin.

    Args:
        number: position of the pair among all pairs.
        rewards: rewards of the pair, with their graph.
        seeds: `sqrt(c_k) u_k`.
    """

    number: int
    rewards: Float[Tensor, " sequences"]
    seeds: tuple[Float[Tensor, " sequences"], ...]

    def gradients(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The rows, one tensor for each parameter."""
        for left, seed in zip(reversed(range(len(self.seeds))), self.seeds, strict=True):
            yield torch.autograd.grad(
                self.rewards, parameters, seed, retain_graph=left > 0, allow_unused=True, materialize_grads=True
            )


def curvature_rows(objective: PairObjective, curvature: OutputCurvature) -> Iterator[PairRows]:
    """The rows of each pair in turn, each from a forward pass of its own."""
    singles = (single for batch in objective.batches for single in single_pairs(batch))
    for number, single in enumerate(singles):
        rewards = objective.model.rewards_of(single)
        seeds = (fisher_factors if curvature == "fisher" else _gauss_newton_factors)(
            objective, single, rewards.detach()
        )
        yield PairRows(number, rewards, tuple(objective.checked(seeds)))


def _gauss_newton_factors(
    objective: PairObjective, single: PairBatch, rewards: Float[Tensor, " sequences"]
) -> Float[Tensor, "rows 2"]:
    block = objective.checked(output_blocks(objective, single, rewards, "gauss_newton")[0].double())
    values, vectors = torch.linalg.eigh(block)
    kept = values > _ROUNDING * torch.finfo(rewards.dtype).eps * values.max()
    factors: Tensor = (values[kept].sqrt() * vectors[:, kept]).T
    return factors.to(rewards.dtype)


def _padded(batch: AnyPairBatch, sequences: Sequence[Tensor], positions: Sequence[int]) -> PairBatch:
    rows = [sequences[row] for index in positions for row in (2 * index, 2 * index + 1)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows], device=ids.device)
    mask = (torch.arange(ids.shape[1], device=ids.device) < lengths).long()
    at = torch.tensor(positions, device=batch.weight.device)
    return PairBatch(ids, mask, batch.margin[at], batch.label[at], batch.weight[at], batch.pair_index[at])


def _sequences(batch: AnyPairBatch) -> list[Tensor]:
    if isinstance(batch, PackedPairBatch):
        return _tree_sequences(batch.trees)
    return [ids[mask != 0] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def _tree_sequences(trees: PackedTrees) -> list[Tensor]:
    """Tokens of each sequence: those that its last token attends to."""
    visible = tree_mask(trees)[:, 0]
    width = trees.input_ids.shape[1]
    places = [divmod(place, width) for place in trees.last.tolist()]
    return [trees.input_ids[row][visible[row, column]] for row, column in places]
