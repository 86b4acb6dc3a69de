"""Cross-fitted top eigenvalues: vectors from one half of the pairs, curvature along them from the other half."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.landscape.estimates.by_pair import pair_curvatures, weighted_means
from rm_optimizer.landscape.operators.base import HessianOperator
from rm_optimizer.landscape.operators.gauss_newton import GramSpectrum
from rm_optimizer.landscape.operators.objective import PairObjective
from rm_optimizer.landscape.operators.single_pairs import chosen_pairs
from rm_optimizer.landscape.operators.support import SupportedOperator
from rm_optimizer.landscape.solvers.krylov import KeptState, part_file
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, lanczos

FIT_TOLERANCE = 0.05
"""Relative residual of a half's eigenvalues. The value along a vector is unbiased whatever the vector is."""
FEWEST_PROMPTS = 4
"""Least number of prompts for cross-fitting; with fewer, a quarter of the pairs may be empty."""
FEW_PROMPTS = 32
"""Number of prompts below which a measurement warns that intervals over pairs cover the truth too seldom."""
Pairs = NDArray[np.int64]
"""Places of pairs in the order of the objective's batches."""


@dataclass(frozen=True)
class TopOfSamples:
    """Largest eigenvalue of disjoint samples of the pairs.

    Args:
        num_pairs: pairs of each sample, on average.
        values: largest eigenvalue of each.
    """

    num_pairs: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class CrossFit:
    """Cross-fitted top eigenvalues, and the decrease of the largest eigenvalue with the number of pairs.

    A sample's largest eigenvalue is too large on average, as its vector is fitted to the pairs that it is measured on.
    A cross-fitted one is too small on average, as no vector has more curvature than the population's top one.

    Args:
        values: curvature along each half's vector measured on the other half, averaged over the two halves, with its
            interval over pairs.
        population_low: lower end of a 95 % interval of the population's largest eigenvalue, the cross-fitted value's.
        population_high: its upper end, the larger one of the cross-fitted value's and the sample's.
        by_num_pairs: the largest eigenvalue of quarters, halves and all of the pairs.
        num_products: products with halves and quarters of the pairs.
    """

    values: tuple[Estimate, ...]
    population_low: float | None
    population_high: float | None
    by_num_pairs: tuple[TopOfSamples, ...]
    num_products: int


def halves_of(clusters: Sequence[int], seed: int) -> tuple[Pairs, Pairs]:
    """Two halves of the pairs; all pairs of one prompt are in the same half.

    Args:
        clusters: number of each pair's prompt.
        seed: seed of the draw.
    """
    distinct = np.random.default_rng(seed).permutation(np.unique(clusters))
    is_first = np.isin(clusters, distinct[: len(distinct) // 2])
    return np.flatnonzero(is_first), np.flatnonzero(~is_first)


def cross_fit_hessian(
    operator: HessianOperator,
    sampling: Sequence[Estimate],
    *,
    top: float,
    clusters: Sequence[int],
    seed: int,
    state_file: Path | None = None,
) -> CrossFit | None:
    """Cross-fit the Hessian's top eigenvalues.

    None for fewer than `FEWEST_PROMPTS`. It costs about as much as the eigenvalues of all pairs to `FIT_TOLERANCE`.
    The operator's `on_product` is called after each product with a part of the pairs, too.

    Args:
        operator: the Hessian.
        sampling: eigenvalues of all pairs with their intervals over pairs; as many are cross-fitted.
        top: largest eigenvalue of all pairs.
        clusters: number of each pair's prompt, in the order of the batches.
        seed: seed of halves, starting vectors and resampling.
        state_file: file next to which each search keeps its state; None keeps no state. The caller removes them.
    """
    objective = operator.objective
    if len(set(clusters)) < FEWEST_PROMPTS:
        return None
    operator.release()
    numbers = itertools.count(operator.num_products + 1)

    def top_of(part: PairObjective, count: int, number: int) -> Eigenpairs:
        hessian = HessianOperator(part, product=operator.product)  # the cheapest for all pairs serves parts of them
        hessian.on_product = lambda _: operator.on_product(next(numbers))
        matrix = SupportedOperator(hessian)
        kept = KeptState(hessian, matrix.support, part_file(state_file, number), seed)
        found = lanczos(
            matrix,
            count,
            tolerance=FIT_TOLERANCE,
            seed=seed,
            state=kept.state,
            on_iteration=lambda _: kept.after_product(),
            on_done=hessian.release,
        )
        kept.save()
        return found.widened(matrix.support)

    halves = halves_of(clusters, seed)
    parts = [part_of(objective, half) for half in halves]
    most, num_products = len(sampling), 0
    columns = np.zeros((objective.num_pairs, most))
    tops: list[float] = []
    for number, (part, other, held) in enumerate(zip(parts, parts[::-1], halves[::-1], strict=True)):
        found = top_of(part, len(sampling), number)
        columns[held, : len(found.values)] = pair_curvatures(other, found.vectors).cpu().numpy()
        most, num_products = min(most, len(found.values)), num_products + found.num_products
        tops.append(float(found.values[0]))
        del found  # frees the memory that the other half's vectors need
    quarters = [_quarters(half, clusters, seed)[0] for half in halves]
    smaller = [top_of(part_of(objective, quarter), 1, number) for number, quarter in enumerate(quarters, start=2)]
    by_num_pairs = (
        _sample(quarters, [float(pairs.values[0]) for pairs in smaller]),
        _sample(halves, tops),
        TopOfSamples(objective.num_pairs, (top,)),
    )
    num_products += sum(pairs.num_products for pairs in smaller)
    values = weighted_means(columns[:, :most], objective.pair_weights, clusters=clusters, seed=seed)
    return cross_fitted(values, sampling, by_num_pairs, num_products)


def cross_fit_gram(gram: GramSpectrum, num_values: int, *, clusters: Sequence[int], seed: int) -> CrossFit | None:
    """Cross-fit the top eigenvalues of a Gauss-Newton or Fisher matrix, from products of its rows alone.

    Along `v = B_A^T u / sqrt(lambda)` a row `b` of the other half has curvature `(b^T v)^2 = (G u)_b^2 / lambda`, with
    `G = B B^T` and `u` an eigenvector of one half's part of it. None for fewer than `FEWEST_PROMPTS`.

    Args:
        gram: products of the rows of all pairs.
        num_values: eigenvalues.
        clusters: number of each pair's prompt.
        seed: seed of halves and resampling.
    """
    if len(set(clusters)) < FEWEST_PROMPTS:
        return None
    halves, everything = halves_of(clusters, seed), np.arange(gram.num_pairs)
    num_values = min(num_values, *(gram.rank_of(half) for half in halves))
    if num_values == 0:
        return None
    columns = np.zeros((gram.num_pairs, num_values))
    for fitted, held in (halves, halves[::-1]):
        columns[held] = gram.curvatures(fitted, held, num_values)
    quarters = [quarter for half in halves for quarter in _quarters(half, clusters, seed)]
    own = gram.curvatures(everything, everything, 1)
    values, sampling = (
        weighted_means(each, gram.pair_weights, clusters=clusters, seed=seed) for each in (columns, own)
    )
    parts = (_sample(parts, [float(gram.values_of(part)[0]) for part in parts]) for parts in (quarters, halves))
    return cross_fitted(values, sampling, (*parts, TopOfSamples(gram.num_pairs, (float(gram.values[0]),))))


def part_of(objective: PairObjective, pairs: Pairs) -> PairObjective:
    """The loss over some of the pairs."""
    batches, start = [], 0
    for batch in objective.batches:
        inside = pairs[(pairs >= start) & (pairs < start + batch.num_pairs)] - start
        if len(inside):
            batches.append(chosen_pairs(batch, inside.tolist()))
        start += batch.num_pairs
    return PairObjective(objective.model, batches, objective.loss, objective.subset, None)


def _quarters(half: Pairs, clusters: Sequence[int], seed: int) -> list[Pairs]:
    """The two halves of a half."""
    return [half[places] for places in halves_of(np.asarray(clusters)[half].tolist(), seed)]


def _sample(parts: Sequence[Pairs], values: Sequence[float]) -> TopOfSamples:
    return TopOfSamples(float(np.mean([len(part) for part in parts])), tuple(values))


def cross_fitted(
    values: tuple[Estimate, ...],
    sampling: Sequence[Estimate],
    by_num_pairs: tuple[TopOfSamples, ...],
    num_products: int = 0,
) -> CrossFit:
    """Cross-fit from the curvatures of pairs along the vectors of the half that they are not in.

    Args:
        values: mean curvature along each vector with its interval over pairs.
        sampling: eigenvalues of all pairs with their interval over pairs.
        by_num_pairs: largest eigenvalue of parts and of all of the pairs.
        num_products: products with halves and quarters.
    """
    ends = [estimate.high for estimate in (values[0], *sampling[:1]) if estimate.high is not None]
    return CrossFit(values, values[0].low, max(ends, default=None), by_num_pairs, num_products)
