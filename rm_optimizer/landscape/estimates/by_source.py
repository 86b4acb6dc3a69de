"""Shares of single pairs, and of groups of pairs such as sources, in the curvature along the top eigenvectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum

HEAVIEST = 10
"""Number of pairs that are listed by name."""


@dataclass(frozen=True)
class PairCurvatures:
    """Curvature of each pair along the first eigenvectors of all of them.

    Args:
        along: `v_k^T H_i v_k` of each pair.
        weights: weight of each pair in the loss.
        pair_index: position of each pair in the data.
        gram: products of the pairs' rows of a Gauss-Newton or Fisher matrix; None for a Hessian.
    """

    along: Float[np.ndarray, "pairs values"]
    weights: Float[np.ndarray, " pairs"]
    pair_index: tuple[int, ...]
    gram: GramSpectrum | None = None


@dataclass(frozen=True)
class DescribedPair:
    """Identity of a pair, for a reader.

    Args:
        pair_id: identity of prompt and both responses.
        prompt: beginning of the prompt.
        groups: the group of each column, such as its `source`.
    """

    pair_id: str
    prompt: str
    groups: Mapping[str, str]


@dataclass(frozen=True)
class GroupCurvature:
    """Curvature of the pairs of a group.

    Args:
        column: column that groups them, such as `source`.
        name: the group.
        num_pairs: pairs in it.
        along: `v_k^T H_s v_k` along the first eigenvectors of all pairs, `H_s` being the group's matrix.
        share: the group's share of the first eigenvalue; the shares of a column sum to 1.
        eigenvalues: largest eigenvalues of the group alone; empty for a Hessian, since they would cost products.
    """

    column: str
    name: str
    num_pairs: int
    along: tuple[float, ...]
    share: float
    eigenvalues: tuple[float, ...]


@dataclass(frozen=True)
class PairShare:
    """Share of a pair in the first eigenvalue.

    Args:
        pair: the pair.
        curvature: `v_1^T H_i v_1` of the pair alone.
        share: its share of the first eigenvalue; negative for a pair that lowers it.
    """

    pair: DescribedPair
    curvature: float
    share: float


@dataclass(frozen=True)
class CurvatureByPair:
    """Shares of groups and of single pairs in the top curvature.

    Args:
        groups: each group of each column.
        heaviest: the pairs with the largest shares in magnitude, largest first.
    """

    groups: tuple[GroupCurvature, ...]
    heaviest: tuple[PairShare, ...]


def pair_indices(batches: Iterable[AnyPairBatch]) -> tuple[int, ...]:
    """Position of each pair in the data, in the order of the batches."""
    return tuple(index for batch in batches for index in batch.pair_index.tolist())


def curvature_by_pair(found: PairCurvatures, described: Mapping[int, DescribedPair]) -> CurvatureByPair:
    """Shares of pairs and groups in the curvature along the first eigenvectors, without further products.

    Args:
        found: curvature of each pair.
        described: pairs by their position in the data.
    """
    pairs = [described[index] for index in found.pair_index]
    parts = found.along[:, 0] * found.weights
    shares = parts / (float(parts.sum()) or 1.0)
    order = np.argsort(-np.abs(shares))[:HEAVIEST]
    heaviest = tuple(PairShare(pairs[i], float(found.along[i, 0]), float(shares[i])) for i in order)
    columns = list(dict.fromkeys(column for pair in pairs for column in pair.groups))
    groups = [
        _group(found, shares, column, name, [pair.groups.get(column) == name for pair in pairs])
        for column in columns
        for name in sorted({pair.groups[column] for pair in pairs if column in pair.groups})
    ]
    return CurvatureByPair(tuple(groups), heaviest)


def _group(
    found: PairCurvatures, shares: Float[np.ndarray, " pairs"], column: str, name: str, is_member: Sequence[bool]
) -> GroupCurvature:
    inside = np.flatnonzero(is_member)
    weights = found.weights[inside]
    along = (found.along[inside] * weights[:, None]).sum(axis=0) / weights.sum()
    own = [] if found.gram is None else found.gram.values_of(inside)[: found.along.shape[1]].tolist()
    return GroupCurvature(column, name, len(inside), tuple(along.tolist()), float(shares[inside].sum()), tuple(own))
