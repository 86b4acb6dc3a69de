"""Products of Lanczos beside the smallest Krylov space that holds the wanted eigenvalues."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from landscape_subjects import Subject
from scipy.linalg import eigvalsh_tridiagonal

from rm_optimizer.landscape.operators.base import HessianOperator, SymmetricOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.operators.support import SupportedOperator
from rm_optimizer.landscape.solvers.krylov import KrylovState
from rm_optimizer.landscape.solvers.lanczos import End, lanczos, select
from rm_optimizer.schema import LossConfig

TOLERANCE, PRECISE = 1e-3, 1e-5


def oracle_products(state: KrylovState, truth: Sequence[float], top_k: int, which: End) -> int | None:
    """Fewest products after which the Ritz values are within `TOLERANCE` of the truth; None if they never are.

    Args:
        state: a finished iteration; its first vectors span the smaller Krylov spaces.
        truth: wanted eigenvalues, descending.
        top_k: number of them at an end.
        which: end of the spectrum.
    """
    expected = np.asarray(truth)
    for size in range(len(expected), len(state.diagonal) + 1):
        values = eigvalsh_tridiagonal(np.array(state.diagonal[:size]), np.array(state.off_diagonal[: size - 1]))
        found = values[select(values, top_k, which)]
        if len(found) == len(expected) and (np.abs(found - expected) <= TOLERANCE * np.abs(expected)).all():
            return size
    return None


def over_oracle(operator: SymmetricOperator, tops: Sequence[int], seed: int = 0) -> dict[str, float]:
    """Products of the stopping rule for the largest values by magnitude, and how many the oracle saves of them.

    One iteration serves all: it stops at the fewest values first and goes on. The truth is where it stands once the
    most values have residuals of `PRECISE`.

    Args:
        operator: the matrix.
        tops: numbers of eigenvalues, ascending.
        seed: seed of the starting vector.
    """
    state = KrylovState()
    taken = {k: lanczos(operator, k, which="magnitude", seed=seed, state=state).num_products for k in tops}
    values = lanczos(operator, tops[-1], which="magnitude", tolerance=PRECISE, seed=seed, state=state).values.numpy()
    results: dict[str, float] = {}
    for k, products in taken.items():
        truth = np.sort(values[np.argsort(-np.abs(values))[:k]])[::-1]
        results[f"products_top{k}"] = products
        results[f"products_over_oracle_top{k}"] = products - (oracle_products(state, truth, k, "magnitude") or np.nan)
    return results


def measure_oracle(args: argparse.Namespace, subject: Subject) -> dict[str, float]:
    """Products over the oracle's for half of the top, the top and twice the top."""
    with measuring(subject.model, subject.batches, LossConfig()) as objective:
        return over_oracle(SupportedOperator(HessianOperator(objective)), (args.top_k // 2, args.top_k, 2 * args.top_k))
