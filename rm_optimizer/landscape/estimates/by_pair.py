"""Curvature of single pairs along vectors: sampling error, and shares of pairs and of their groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.draws import Prompts
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.products import load_forward_rules

LARGEST_STEP = {torch.float32: 1e-2, torch.float64: 1e-4}
"""First step of a difference along a unit vector; smaller steps are tried after it."""

_NUM_STEPS, _STEP_RATIO = 6, 4
"""Most steps tried, and the ratio of each to the next."""

ACCURATE = 1e-3
"""Error of the mean over pairs at which a step is small enough, relative to the mean size of the pairs' curvatures."""


def pair_curvatures(
    objective: PairObjective,
    vectors: Float[Tensor, "vectors parameters"],
    quotients: Sequence[float] | None = None,
) -> Float[Tensor, "pairs vectors"]:
    """Second derivative of each pair's loss along each vector, `v^T H_i v`, by differences of forward derivatives.

    Their mean over pairs is `v^T H v`. The step of a difference is divided by 4 until the error of the mean is within
    `ACCURATE`, or becomes larger again as rounding grows. The first step of a vector is four times the last one of the
    vector before, so that most vectors need two. The error of a central difference is proportional to the square of
    its step. Therefore, if the mean is not known, the error is a fifteenth of the change from the step before.

    Args:
        objective: the loss.
        vectors: unit vectors.
        quotients: `v^T H v` of each vector, which saves up to half of the differences; None if they are not known.

    Raises:
        ConfigError: if the model has no forward derivatives, or the pairs lie in several processes.
    """
    if objective.group is not None:
        raise ConfigError("the sampling error over pairs needs all pairs in one process; give it all and no group")
    objective.require_still()
    load_forward_rules()
    known = [None] * len(vectors) if quotients is None else quotients
    columns: list[Tensor] = []
    first = LARGEST_STEP[objective.dtype]
    for vector, mean in zip(vectors, known, strict=True):
        found, step = _along_all(objective, vector, mean, first)
        columns.append(found)
        first = min(LARGEST_STEP[objective.dtype], _STEP_RATIO * step)
    return objective.checked(torch.stack(columns, dim=1))


def weighted_means(
    values: Float[np.ndarray, "pairs columns"],
    weights: Float[np.ndarray, " pairs"],
    *,
    clusters: Sequence[int] | None = None,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> tuple[Estimate, ...]:
    """Weighted mean of each column, with its spread when clusters are resampled.

    Of the pairs' curvatures along an eigenvector this is the spread of the eigenvalue to first order, in which the
    vector does not change. The interval (bias-corrected and accelerated) covers the population's mean in about 95 % of
    samples if the columns were fixed beforehand and there are some dozens of clusters without heavy tails. A column
    along an eigenvector of the same pairs was fitted to these pairs. Its mean is therefore too large, and the interval
    lies too high.

    Args:
        values: one row for each pair.
        weights: weight of each pair.
        clusters: number of each pair's cluster, such as the prompt; resampling draws clusters. None takes each pair as
            one.
        num_bootstrap: resamples.
        seed: seed of the resampling.

    Raises:
        ConfigError: if the clusters are not one for each pair.
    """
    sums = cluster_totals(np.column_stack([values * weights[:, None], weights]), clusters)
    return cluster_bootstrap(
        sums, lambda totals: totals[..., :-1] / totals[..., -1:], num_bootstrap=num_bootstrap, seed=seed
    )


def _along_all(objective: PairObjective, vector: Tensor, known: float | None, first: float) -> tuple[Tensor, float]:
    """Curvatures of all pairs along a vector with the step that has the smallest error of their mean, and that step."""
    weights = torch.cat([batch.weight for batch in objective.batches]).double()
    share = weights / weights.sum()
    best, used, least, before = None, first, math.inf, math.nan
    for number in range(_NUM_STEPS):
        step = first / _STEP_RATIO**number
        found = torch.cat([_along(objective, batch, vector, step) for batch in objective.batches]).double()
        mean = float((found * share).sum())
        error = abs(mean - before) / (_STEP_RATIO**2 - 1) if known is None else abs(mean - known)
        if best is not None and error >= least:
            break
        best, used, before = found, step, mean
        if math.isnan(error):  # the first step has no earlier mean to compare with
            continue
        least = error
        if error <= ACCURATE * float((found.abs() * share).sum()):
            break
    assert best is not None, "at least one step is tried"
    return best, used


def _along(objective: PairObjective, batch: AnyPairBatch, vector: Tensor, step: float) -> Tensor:
    """Central difference of slopes along the vector, since some activations have no second forward derivative."""

    def losses(*weights: Tensor) -> Tensor:
        return objective.pair_losses(objective.rewards_at(weights, batch), batch)

    direction = tuple(objective.subset.unflatten(vector))
    try:
        with torch.no_grad():
            ahead, behind = (jvp(losses, objective.moved(at * vector), direction)[1] for at in (step, -step))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(objective.model.model).__name__} has no forward derivatives; set num_sampled=0 to do without the "
            "sampling error over pairs"
        ) from error
    difference: Tensor = (ahead - behind) / (2 * step)
    return difference


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


def clusters_of(batches: Iterable[AnyPairBatch], prompts: Prompts | None) -> Sequence[int]:
    """Number of each pair's prompt, in the order of the batches; without prompts, each pair is one."""
    indices = pair_indices(batches)
    return range(len(indices)) if prompts is None else [prompts[index] for index in indices]


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
    groups: list[GroupCurvature] = []
    for column in dict.fromkeys(column for pair in pairs for column in pair.groups):
        for name in sorted({pair.groups[column] for pair in pairs if column in pair.groups}):
            inside = np.flatnonzero([pair.groups.get(column) == name for pair in pairs])
            weights = found.weights[inside]
            along = (found.along[inside] * weights[:, None]).sum(axis=0) / weights.sum()
            own = [] if found.gram is None else found.gram.values_of(inside)[: found.along.shape[1]].tolist()
            share = float(shares[inside].sum())
            groups.append(GroupCurvature(column, name, len(inside), tuple(along.tolist()), share, tuple(own)))
    return CurvatureByPair(tuple(groups), heaviest)
