"""Full spectrum of the Gauss-Newton matrix, from the gradients of single pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals
from rm_optimizer.core.tokens.batching import PairBatch
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import OutputCurvature, fisher_factors, output_blocks
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.single_pairs import single_pairs
from rm_optimizer.landscape.operators.support import support_of
from rm_optimizer.landscape.operators.vectors import gram_matrix, pairwise_inner, unit

_ROW_BYTES = 4_000_000_000
"""Most memory for the gradients of single pairs, if no limit is given."""
_ROUNDING = 16
"""Bound in units of the rewards' precision; a smaller second eigenvalue of a pair's matrix is a rounded 0."""


RowKind = OutputCurvature | Literal["rewards"]
"""Rows whose outer products are a curvature, or the gradients of a pair's margin or, for other losses, its rewards."""


def curvature_rows(
    objective: PairObjective,
    kind: RowKind,
    parameters: Sequence[Tensor],
    is_wanted: Callable[[int], bool] = lambda number: True,
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Rows of a matrix `J^T C J`, whose outer products add up to it, from a forward pass for each pair.

    With `C_i = sum_k c_k u_k u_k^T` for a pair's two rewards, its rows are `sqrt(c_k) J_i^T u_k`; a loss without
    regularizers has one, along the margin. Rows of `rewards` are the gradient of the margin, or, if the loss reads more
    than margins, the gradients of the chosen and of the rejected reward.

    Args:
        objective: the loss.
        kind: the matrix, or `rewards`.
        parameters: parameters to derive by.
        is_wanted: function of a pair's position that is False for a pair without rows.

    Yields:
        Position of the pair among all pairs, and a row of it, one tensor for each parameter.
    """
    singles = (single for batch in objective.batches for single in single_pairs(batch))
    for number, single in enumerate(singles):
        if not is_wanted(number):
            continue
        rewards = objective.model.rewards_of(single)
        seeds = objective.checked(_FACTORS[kind](objective, single, rewards.detach()))
        for left, seed in zip(reversed(range(len(seeds))), seeds, strict=True):
            yield (
                number,
                torch.autograd.grad(
                    rewards, parameters, seed, retain_graph=left > 0, allow_unused=True, materialize_grads=True
                ),
            )


def _gauss_newton_factors(
    objective: PairObjective, single: PairBatch, rewards: Float[Tensor, " sequences"]
) -> Float[Tensor, "rows 2"]:
    """The vectors `sqrt(c_k) u_k` of a pair."""
    block = objective.checked(output_blocks(objective, single, rewards, "gauss_newton")[0].double())
    values, vectors = torch.linalg.eigh(block)
    kept = values > _ROUNDING * torch.finfo(rewards.dtype).eps * values.max()
    factors: Tensor = (values[kept].sqrt() * vectors[:, kept]).T
    return factors.to(rewards.dtype)


def _outputs(
    objective: PairObjective, single: PairBatch, rewards: Float[Tensor, " sequences"]
) -> Float[Tensor, "rows 2"]:
    """The margin as a combination of a pair's rewards, or both rewards."""
    return rewards.new_tensor([[1, -1]]) if objective.loss.is_of_margins else torch.eye(2).to(rewards)


_FACTORS: Mapping[RowKind, Callable[[PairObjective, PairBatch, Tensor], Tensor]] = {
    "fisher": fisher_factors,
    "gauss_newton": _gauss_newton_factors,
    "rewards": _outputs,
}
_ZERO = 1e-12
"""Share of the largest eigenvalue below which an eigenvalue counts as 0."""


def reward_gradients(
    objective: PairObjective,
    rows: Float[np.ndarray, "rows columns"],
    *,
    seed: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, "rows columns"]:
    """Gradients of each pair's margin, or of its two rewards if the loss reads more than margins, in `rows`.

    If the rows have fewer columns than there are weights with a gradient, these are added up in random columns with
    random signs (count sketch; Charikar et al., 2002). An inner product of two rows is then unbiased, with a standard
    deviation of at most `sqrt(2 / columns)` times the product of their lengths. One backward pass a row.

    Args:
        objective: the loss.
        rows: array to write into, one or two rows a pair in the order of the batches; rows that end with NaN are
            computed, and others are kept.
        seed: seed of the columns and signs.
        rank: rank of this process, which computes every `num_ranks`-th pair.
        num_ranks: number of processes that write into the array.
        on_progress: function of the number of pairs done and of all.
    """
    support, per_pair = support_of(objective, num_spare=0), len(rows) // objective.num_pairs
    bucket = sign = None
    if rows.shape[1] < support.dimension:
        generator = torch.Generator().manual_seed(seed)
        bucket = torch.randint(rows.shape[1], (support.dimension,), generator=generator).to(objective.device)
        sign = (2 * torch.randint(2, (support.dimension,), generator=generator) - 1).to(objective.device)
    seen = dict.fromkeys(range(objective.num_pairs), 0)

    def is_wanted(number: int) -> bool:
        return number % num_ranks == rank and bool(np.isnan(rows[(number + 1) * per_pair - 1, -1]))

    kept = curvature_rows(objective, "rewards", objective.parameters, is_wanted)
    for number, gradient in kept:
        whole = torch.cat([support.part(place, part).reshape(-1) for place, part in enumerate(gradient)])
        if bucket is not None and sign is not None:
            whole = whole.new_zeros(rows.shape[1]).index_add_(0, bucket, whole * sign)
        rows[number * per_pair + seen[number]] = whole.cpu()
        seen[number] += 1
        on_progress(number + 1, objective.num_pairs)
    return rows


@dataclass(frozen=True)
class GramSpectrum:
    """Spectrum of a matrix `B^T B` with few rows `B`, from `B B^T`, which has the same nonzero eigenvalues.

    Args:
        gram: `B B^T`.
        pair_of_row: the pair that each row belongs to.
        pair_weights: the pairs' weights in the loss.
        values: eigenvalues, descending; all others of the large matrix are 0.
        vectors: unit eigenvectors of the large matrix for the first values, as many as requested.
        num_passes: number of times that all pairs' gradients were computed; above 1 if they did not fit into memory.
    """

    gram: Float[np.ndarray, "rows rows"]
    pair_of_row: NDArray[np.int64]
    pair_weights: Float[np.ndarray, " pairs"]
    values: Float[np.ndarray, " rows"]
    vectors: Float[Tensor, "values parameters"]
    num_passes: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs of the matrix."""
        return len(self.pair_weights)

    @property
    def trace(self) -> float:
        """Trace of the matrix."""
        return float(np.trace(self.gram))

    def bootstrap(
        self, num_values: int, *, clusters: Sequence[int] | None = None, num_bootstrap: int = 200, seed: int = 0
    ) -> tuple[Estimate, ...]:
        """The first eigenvalues and, last, the trace, each with its spread when the pairs are resampled.

        If pair i occurs `n_i` times in a resample, its rows are scaled by `sqrt(n_i W / W')`, with `W'` the resample's
        weight, so that a resample costs one small eigenproblem (Efron, 1979). The interval is the basic one, `[2 t -
        q_high, 2 t - q_low]`, clipped at 0 and widened to contain the value. It covers the population's trace in about
        95 % of samples. For an eigenvalue it shows only the spread under resampling. Eigenvalues of few pairs are too
        large, and this error exceeds the interval unless the pairs outnumber the directions of that size.

        Args:
            num_values: number of eigenvalues.
            clusters: number of the cluster, such as the prompt, of each pair in the order of the objective's batches;
                clusters are resampled. None takes each pair as one.
            num_bootstrap: resamples.
            seed: seed of the resampling.

        Raises:
            ConfigError: if the clusters are not one for each pair.
        """
        pairs_of_cluster = cluster_totals(np.eye(self.num_pairs), clusters)

        def of_counts(counts: np.ndarray) -> np.ndarray:
            return np.apply_along_axis(self._resampled, -1, counts, num_values)

        return cluster_bootstrap(pairs_of_cluster, of_counts, num_bootstrap=num_bootstrap, seed=seed, kind="basic")

    def values_of(self, pairs: Int[np.ndarray, " pairs"]) -> Float[np.ndarray, " rows"]:
        """Eigenvalues of the matrix of some of the pairs, descending; one 0 if their losses are flat."""
        values = np.linalg.eigvalsh(self._part(pairs)[0])[::-1]
        return np.asarray(values if len(values) else np.zeros(1))

    def rank_of(self, pairs: Int[np.ndarray, " pairs"]) -> int:
        """Number of eigenvalues above 0 of the matrix of some of the pairs."""
        values = self.values_of(pairs)
        return int((values > _ZERO * max(values.max(initial=0.0), np.finfo(np.float64).tiny)).sum())

    def curvatures(
        self, fitted: Int[np.ndarray, " fitted"], held: Int[np.ndarray, " held"], num_values: int
    ) -> Float[np.ndarray, "held values"]:
        """Curvature of each held pair along the top eigenvectors of the fitted pairs' matrix; 0 beyond its rank."""
        matrix, rows = self._part(fitted)
        values, vectors = np.linalg.eigh(matrix)
        values, vectors = values[::-1][:num_values], vectors[:, ::-1][:, :num_values]
        usable = values > _ZERO * max(values.max(initial=0.0), np.finfo(np.float64).tiny)
        share = self.pair_weights / self.pair_weights.sum()
        scale = np.sqrt(1.0 / share[fitted].sum())
        along = np.zeros((len(self.gram), num_values))
        along[:, : len(values)][:, usable] = scale * (self.gram[:, rows] @ vectors[:, usable]) / np.sqrt(values[usable])
        of_pairs = np.zeros((self.num_pairs, num_values))
        np.add.at(of_pairs, self.pair_of_row, along**2)
        return np.asarray(of_pairs[held] / np.maximum(share[held, None], np.finfo(np.float64).tiny))

    def _part(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Small matrix of some of the pairs, normalized by their own weight, and the positions of its rows."""
        rows = np.flatnonzero(np.isin(self.pair_of_row, pairs))
        share = self.pair_weights[pairs].sum() / self.pair_weights.sum()
        return self.gram[np.ix_(rows, rows)] / share, rows

    def _resampled(self, counts: np.ndarray, num_values: int) -> np.ndarray:
        share = counts * self.pair_weights.sum() / (counts * self.pair_weights).sum()
        scale = np.sqrt(share[self.pair_of_row])
        matrix = self.gram * scale[:, None] * scale
        return np.array([*np.linalg.eigvalsh(matrix)[::-1][:num_values], np.trace(matrix)])


def gauss_newton_exact(
    objective: PairObjective,
    *,
    curvature: OutputCurvature = "gauss_newton",
    num_vectors: int = 0,
    memory_bytes: int | None = None,
) -> GramSpectrum:
    """All eigenvalues of `sum_i J_i^T C_i J_i`, the Gauss-Newton or empirical Fisher matrix of the loss.

    With `B` the rows of `curvature_rows`, the matrix is `B^T B` and has the eigenvalues of `B B^T`, of as
    many rows as there are pairs, or twice as many if the loss reads more than margins; its eigenvectors are
    `B^T u / ||.||`. If the rows fit into `memory_bytes`, the cost is one backward pass a pair. Otherwise each part of
    the columns that fits costs one for the eigenvalues and one for the vectors. Embeddings that no pair looks up need
    no memory.

    Args:
        objective: the loss; all its pairs in this process.
        curvature: `gauss_newton` or `fisher`.
        num_vectors: number of eigenvectors to return.
        memory_bytes: most memory for rows; if they need more, they are computed for some parameters at a time. None
            is 4 GB.

    Raises:
        ConfigError: if the pairs lie in several processes.
    """
    rows = CurvatureRows(objective, curvature, memory_bytes)
    (gram,) = rows.grams([[(0, rows.dimension)]])
    return rows.spectrum(gram, num_vectors)


class CurvatureRows:
    """Rows `B` without columns of zeros, in blocks of columns that fit into memory; see `gauss_newton_exact`."""

    def __init__(self, objective: PairObjective, curvature: OutputCurvature, memory_bytes: int | None) -> None:
        if objective.group is not None:
            raise ConfigError("gauss_newton_exact needs all pairs in one process; give it all of them and no group")
        objective.require_still()
        self.objective = objective
        self.curvature: OutputCurvature = curvature
        self.support = support_of(objective, num_spare=0)
        is_double = curvature == "gauss_newton" and not objective.loss.is_of_margins
        self._rows_most = objective.num_pairs * (2 if is_double else 1)
        self.dimension = size = self.support.dimension
        self.memory_bytes = memory_bytes or _ROW_BYTES
        columns = max(1, self.memory_bytes // (self._rows_most * torch.finfo(objective.dtype).bits // 8))
        self._spans = [(start, min(start + columns, size)) for start in range(0, size, columns)]
        self._whole: Tensor | None = None
        self.pair_of_row: list[int] = []
        self.num_passes = 0

    @property
    def fits(self) -> bool:
        """True if all rows are in memory at once."""
        return len(self._spans) == 1

    def apply(self, vectors: Float[Tensor, "vectors columns"]) -> Float[Tensor, "vectors columns"]:
        """`B^T B` times each vector."""
        along = self._each(lambda span, block: pairwise_inner(vectors[:, slice(*span)], block))
        return self._combined(torch.stack(along).sum(dim=0))

    def grams(self, parts: Sequence[Sequence[tuple[int, int]]]) -> list[Float[Tensor, "rows rows"]]:
        """`B_p B_p^T` for the columns `B_p` of each part, given as ranges, all from the same rows."""

        def of_block(span: tuple[int, int], block: Tensor) -> Tensor:
            grams = torch.zeros(len(parts), len(block), len(block), dtype=torch.float64)
            for gram, ranges in zip(grams, parts, strict=True):
                for start, stop in ranges:
                    gram += gram_matrix([block[:, max(start - span[0], 0) : max(stop - span[0], 0)]])
            return grams

        return list(self.objective.checked(torch.stack(self._each(of_block)).sum(dim=0)))

    def spectrum(self, gram: Float[Tensor, "rows rows"], num_vectors: int = 0) -> GramSpectrum:
        """Eigenvalues of one of the `grams`; eigenvectors need the one of all columns."""
        values, small = torch.linalg.eigh(gram)
        values, small = values.flip(0).clamp(min=0), small.flip(1)
        vectors = torch.empty(0, self.objective.subset.num_parameters)
        if wanted := min(num_vectors, len(gram)):
            combined = self._combined(small[:, :wanted].T)
            vectors = self.support.widen(torch.stack([unit(vector) for vector in combined]))
        return GramSpectrum(
            gram.numpy(),
            np.array(self.pair_of_row),
            self.objective.pair_weights,
            values.numpy(),
            vectors,
            self.num_passes,
        )

    def _combined(self, weights: Float[Tensor, "vectors rows"]) -> Float[Tensor, "vectors columns"]:
        return torch.cat(self._each(lambda span, block: weights.to(block) @ block), dim=1)

    def _each(self, function: Callable[[tuple[int, int], Tensor], Tensor]) -> list[Tensor]:
        """Results of a function of each span and its block; a single block with all rows is kept for the next call."""
        if not self.fits:
            return [function(span, self._block(span)) for span in self._spans]
        if self._whole is None:
            self._whole = self._block(self._spans[0])
        return [function(self._spans[0], self._whole)]

    def _block(self, span: tuple[int, int]) -> Tensor:
        # the parameters in the span, and the span's range within them
        sizes = np.array([shape.numel() for shape in self.support.shapes])
        starts, ends = sizes.cumsum() - sizes, sizes.cumsum()
        chosen: list[int] = np.flatnonzero((ends > span[0]) & (starts < span[1])).tolist()
        inner = slice(span[0] - int(starts[chosen[0]]), span[1] - int(starts[chosen[0]]))
        parameters = [self.objective.parameters[index] for index in chosen]
        block = torch.empty(
            self._rows_most, span[1] - span[0], dtype=self.objective.dtype, device=self.objective.device
        )
        pair_of_row: list[int] = []
        for number, gradient in curvature_rows(self.objective, self.curvature, parameters):
            parts = map(self.support.part, chosen, gradient)
            block[len(pair_of_row)] = torch.cat([part.reshape(-1) for part in parts])[inner]
            pair_of_row.append(number)
        if not pair_of_row:  # the losses of all pairs are flat, and give one row of zeros
            block[:1], pair_of_row = 0, [0]
        self.pair_of_row = pair_of_row
        self.num_passes += 1
        return block[: len(pair_of_row)]
