"""Trace and Frobenius norm of a symmetric operator from products with random vectors, with honest error bars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from scipy.stats import t as student_t
from torch import Tensor

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, SymmetricOperator
from rm_optimizer.landscape.operators.combined import DeflatedOperator, DifferenceOperator
from rm_optimizer.landscape.operators.random_vectors import RandomVectors
from rm_optimizer.landscape.operators.vectors import inner
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs

XTRACE_WIDENING = 1.3
"""Factor on XTrace's own standard error, which treats its estimates as independent and so covers too little."""


def hutchinson_trace(operator: SymmetricOperator, num_products: int, *, seed: int) -> Estimate:
    """Mean of `z^T A z` over vectors of random signs (Hutchinson, 1990).

    The interval is Student's. From one vector the variance is bounded by `2 ||A z||^2`, whose mean is `2 ||A||_F^2`.
    """
    _require_products(num_products, 1, "hutchinson")
    return _mean_of_probes(operator, RandomVectors(operator, seed), num_products)


def deflated_trace(operator: SymmetricOperator, found: Eigenpairs, num_products: int, *, seed: int) -> Estimate:
    """Trace with approximate eigenpairs taken out: `tr(V A V^T) + mean (P z)^T A (P z)` with `P = 1 - V^T V`.

    Exact in expectation for any orthonormal rows `V` with their Rayleigh quotients, and of less variance the nearer
    they are to eigenvectors. It spends `num_products` beyond those that found the pairs.
    """
    _require_products(num_products, 1, "hutchinson")
    rest = DeflatedOperator(operator, found.vectors)
    return _mean_of_probes(rest, RandomVectors(operator, seed), num_products, known=float(found.values.sum()))


def hutchpp_trace(operator: SymmetricOperator, num_products: int, *, seed: int) -> Estimate:
    """`tr(Q^T A Q)` for a sketch `Q` of the range of `A`, and Hutchinson's estimate of the rest.

    A third of the products each for sketch, its trace and the rest (Meyer, Musco, Musco & Woodruff, 2021,
    arXiv:2010.09649, Algorithm 1). The standard error is that of the last part, the only random one given `Q`.
    """
    _require_products(num_products, 6, "hutchpp")
    random, third = RandomVectors(operator, seed), num_products // 3
    basis = _orthonormal(operator.apply(random.signs(third)))
    known = float((basis.double() * operator.apply(basis).double()).sum())
    rest = DeflatedOperator(operator, basis)
    return _mean_of_probes(rest, random, num_products - 2 * third, known=known)


def xtrace(operator: SymmetricOperator, num_products: int, *, seed: int) -> Estimate:
    """Mean over vectors of Hutch++ estimates whose sketch leaves that vector out, all from the same products.

    With `Q` an orthonormal basis of `A W` and `s_i` the direction in it that vector `w_i` alone adds, the i-th estimate
    is `tr(A Q_i Q_i^T) + w_i^T (1 - Q_i Q_i^T) A (1 - Q_i Q_i^T) w_i` with `Q_i Q_i^T = Q (1 - s_i s_i^T) Q^T`
    (Epperly, Tropp & Webber, 2024, arXiv:2301.07825, Algorithm 1, without its normalization). Deviation: the estimates
    are correlated, so their standard error is widened by `XTRACE_WIDENING` and the interval is Student's.
    """
    _require_products(num_products, 6, "xtrace")
    probes = RandomVectors(operator, seed).signs(min(num_products // 2, operator.dimension))
    images = operator.apply(probes).double()
    factor_q, alone = _sketch(images.T, torch.finfo(operator.dtype).eps)
    reduced = operator.apply(factor_q.T.to(probes.dtype)).double()
    probes = probes.double()
    core, inside, cross = reduced @ factor_q, factor_q.T @ probes.T, reduced @ probes.T
    core = (core + core.T) / 2
    kept = inside - alone * (alone * inside).sum(dim=0)
    estimates = (
        core.trace()
        - (alone * (core @ alone)).sum(dim=0)
        + (probes * images).sum(dim=1)
        - 2 * (kept * cross).sum(dim=0)
        + (kept * (core @ kept)).sum(dim=0)
    )
    return estimate_of_mean(estimates, widening=XTRACE_WIDENING)


TRACE_ESTIMATORS = {"hutchinson": hutchinson_trace, "hutchpp": hutchpp_trace, "xtrace": xtrace}
"""Estimators by name: Hutchinson's below about 30 products, XTrace above."""
TraceMethod = Literal["deflated", "hutchinson", "hutchpp", "xtrace"]
TRACE_METHODS = ("deflated", *TRACE_ESTIMATORS)


def estimate_trace(
    operator: SymmetricOperator, method: str, num_products: int, *, seed: int, found: Eigenpairs | None
) -> Estimate:
    """Trace by the method of that name.

    Args:
        operator: the matrix.
        method: one of `TRACE_METHODS`.
        num_products: products to spend; `hutchpp` and `xtrace` need 6.
        seed: of the random vectors.
        found: eigenpairs that `deflated` takes out, with None nothing; the other methods do not use them.

    Raises:
        ConfigError: if the method is unknown, or the products are too few for it.
    """
    if method not in TRACE_METHODS:
        raise ConfigError(did_you_mean("trace_method", method, TRACE_METHODS))
    if method == "deflated" and found is not None:
        return deflated_trace(operator, found, num_products, seed=seed)
    return TRACE_ESTIMATORS.get(method, hutchinson_trace)(operator, num_products, seed=seed)


def control_variate_trace(
    operator: SymmetricOperator,
    similar: SymmetricOperator,
    similar_trace: float,
    num_products: int,
    *,
    seed: int,
    method: str = "xtrace",
) -> Estimate:
    """The known trace of a similar matrix, and an estimate of the trace of the difference.

    For the Hessian the Gauss-Newton matrix is similar, and `gauss_newton_exact` gives its trace. Each of the products
    takes one of either matrix.
    """
    rest = TRACE_ESTIMATORS[method](DifferenceOperator(operator, similar), num_products, seed=seed)
    return shifted(rest, similar_trace)


def frobenius_norm(
    operator: SymmetricOperator, num_products: int, *, seed: int, found: Eigenpairs | None = None
) -> Estimate:
    """`||A||_F` from the mean of `||A z||^2`, with eigenpairs taken out where they are known.

    `||A||_F^2 = sum lambda_i^2 + 2 sum r_i^2 + ||P A P||_F^2` with residuals `r_i`. The interval is that of the square,
    its ends' roots.
    """
    _require_products(num_products, 2, "frobenius")
    rest = operator if found is None else DeflatedOperator(operator, found.vectors)
    known = 0.0 if found is None else float(found.values.square().sum() + 2 * found.residuals.square().sum())
    products = _products(rest, RandomVectors(operator, seed), num_products)
    return root(estimate_of_mean(known + _numbers([inner(image, image) for _, image in products])))


def root(square: Estimate) -> Estimate:
    """Estimate of the square root, its standard error by the delta method."""
    value = math.sqrt(max(square.value, 0.0))
    error = None if square.standard_error is None or value == 0 else square.standard_error / (2 * value)
    low, high = (None if end is None else math.sqrt(max(end, 0.0)) for end in (square.low, square.high))
    return Estimate(value, error, square.num_samples, low, high)


def shifted(estimate: Estimate, known: float) -> Estimate:
    """The estimate plus a known number."""
    low, high = (None if end is None else end + known for end in (estimate.low, estimate.high))
    return Estimate(estimate.value + known, estimate.standard_error, estimate.num_samples, low, high)


def estimate_of_mean(samples: Float[Tensor, " samples"], *, widening: float = 1.0, bias: float = 0.0) -> Estimate:
    """Mean of independent samples with Student's interval; one sample says nothing of its error.

    Args:
        samples: at least one.
        widening: factor on the standard error of samples that are not quite independent.
        bias: size of an error that all samples share; adds to the standard error as an independent one does.
    """
    count, value = len(samples), float(samples.mean())
    if count < 2:
        return Estimate(value, None, count)
    error = math.hypot(widening * float(samples.std()) / math.sqrt(count), bias)
    half = float(student_t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * error
    return Estimate(value, error, count, value - half, value + half)


def _sketch(images: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Orthonormal basis of the columns, and in it the unit direction that each column alone adds.

    With the singular value decomposition `U S V^T`, column i adds one if its unit vector lies in the space of the rows,
    `sum_j V_ij^2 = 1`; it is `S^-1 V^T e_i`, orthogonal to all other columns. A column that others make up adds none.
    """
    left, values, right = torch.linalg.svd(images, full_matrices=False)
    rank = int((values > rounding * len(images) * values.max()).sum())
    rows = right[:rank]
    adds = rows.square().sum(dim=0) > 1 - rounding * len(images)
    return left[:, :rank], torch.nn.functional.normalize(rows / values[:rank, None], dim=0) * adds


def _products(operator: SymmetricOperator, random: RandomVectors, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors of random signs with their products; few at a time, so that memory does not grow with their number."""
    for start in range(0, count, VECTORS_AT_ONCE):
        probes = random.signs(min(VECTORS_AT_ONCE, count - start))
        yield from zip(probes, operator.apply(probes), strict=True)


def _mean_of_probes(operator: SymmetricOperator, random: RandomVectors, count: int, *, known: float = 0.0) -> Estimate:
    forms = [(inner(probe, image), inner(image, image)) for probe, image in _products(operator, random, count)]
    quadratic = known + _numbers([form for form, _ in forms])
    if count > 1:
        return estimate_of_mean(quadratic)
    error = math.sqrt(2 * forms[0][1])
    value, half = float(quadratic[0]), 1.96 * error
    return Estimate(value, error, 1, value - half, value + half)


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _orthonormal(rows: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(rows.T)[0]
    return basis.T.contiguous()


def _require_products(got: int, least: int, method: str) -> None:
    if got < least:
        raise ConfigError(f"the {method} estimator needs at least {least} products, got {got}")
