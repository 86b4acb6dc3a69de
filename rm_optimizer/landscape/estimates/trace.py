"""Trace of a symmetric operator from products with random vectors, with error bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.stats import chi2
from torch import Tensor

from rm_optimizer.core.metrics.estimate import CONFIDENCE, Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import StudentMean
from rm_optimizer.errors import ConfigError, require_known
from rm_optimizer.landscape.operators.base import VECTORS_AT_ONCE, DeflatedOperator, SymmetricOperator
from rm_optimizer.landscape.operators.vectors import RandomVectors, inner
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs
from rm_optimizer.schema.landscape import TraceMethod


def hutchinson_trace(
    operator: SymmetricOperator, num_products: int, *, seed: int, found: Eigenpairs | None = None
) -> Estimate:
    """Mean of `z^T A z` over vectors of random signs (Hutchinson, 1990).

    The interval is Student's, with the variance of `ProbeSums`. Of a positive semidefinite matrix it is
    `_chi_squared`'s, since the mean of few squares is skewed. With found eigenpairs the estimate is
    `tr(V A V^T) + mean (P z)^T A (P z)` with `P = 1 - V^T V`. It is unbiased for any orthonormal rows `V` with their
    Rayleigh quotients. The closer the rows are to eigenvectors, the smaller its variance. It spends `num_products` in
    addition to the products that found the pairs.
    """
    _require_products(num_products, 1, "hutchinson")
    rest, known = operator, 0.0
    if found is not None:
        rest, known = DeflatedOperator(operator, found.vectors), float(found.values.sum())
    return _mean_of_probes(rest, RandomVectors(operator, seed), num_products, known)


def hutchpp_trace(operator: SymmetricOperator, num_products: int, *, seed: int) -> Estimate:
    """`tr(Q^T A Q)` for a sketch `Q` of the range of `A`, and Hutchinson's estimate of the rest.

    The sketch, its trace and the rest take a third of the products each (Meyer, Musco, Musco & Woodruff, 2021,
    arXiv:2010.09649, Algorithm 1). The standard error comes from the last part, the only random one given `Q`.
    """
    _require_products(num_products, 6, "hutchpp")
    random, third = RandomVectors(operator, seed), num_products // 3
    basis = torch.linalg.qr(operator.apply(random.signs(third)).T)[0].T.contiguous()
    known = float((basis.double() * operator.apply(basis).double()).sum())
    return _mean_of_probes(DeflatedOperator(operator, basis), random, num_products - 2 * third, known)


def xtrace(operator: SymmetricOperator, num_products: int, *, seed: int) -> Estimate:
    """Mean over vectors of Hutch++ estimates whose sketch leaves out that vector, all from the same products.

    With test vectors `omega_i` and `Q_i` an orthonormal basis of all `A omega_j` but the i-th, the i-th estimate is
    `tr(Q_i^T A Q_i) + omega_i^T (1 - Q_i Q_i^T) A (1 - Q_i Q_i^T) omega_i` (Epperly, Tropp & Webber, 2024,
    arXiv:2301.07825, Algorithm 1, without its normalization). Deviation: the estimates are correlated, more strongly
    the closer their number is to the rank of `A`, so their spread understates the error. The standard error is
    therefore the jackknife's: the same products, with each vector left out of everything in turn. It is biased upwards
    (Efron & Stein, 1981, doi:10.1214/aos/1176345462), since one vector less gives a larger error. The interval is
    Student's; for a semidefinite matrix its lower end is at least `tr(Q^T A Q)`.
    """
    _require_products(num_products, 6, "xtrace")
    random = RandomVectors(operator, seed).signs(min(num_products // 2, operator.dimension)).T.double()
    images = _columns_times(operator, random)
    tolerance = torch.finfo(operator.dtype).eps * max(16.0, math.sqrt(operator.dimension))
    Q = _sketch(images, tolerance)[0]
    products = _columns_times(operator, Q)
    compressed = Q.T @ products
    sketch = _Sketch(
        Q.T @ images, (compressed + compressed.T) / 2, Q.T @ random, products.T @ random, (random * images).sum(dim=0)
    )
    estimates, count = sketch.estimates(tolerance), random.shape[1]
    value, error = float(estimates.mean()), 0.0
    if float(np.ptp(estimates)) > tolerance * float(np.abs(estimates).max()):  # else the sketch spans all of A
        others = ~torch.eye(count, dtype=torch.bool, device=random.device)
        without_each = np.array([sketch.of(is_kept).estimates(tolerance).mean() for is_kept in others])
        error = math.sqrt((count - 1) * float(without_each.var()))
    found = StudentMean(value, error, count - 1, count).estimate
    least = min(float(compressed.trace()), value)
    if operator.is_semidefinite and found.low is not None:
        return replace(found, low=max(found.low, least))
    return found


@dataclass(frozen=True)
class _Sketch:
    """Products of XTrace in the basis `Q` of all images; the names are the paper's.

    Args:
        Y: images `A omega_i` in the basis.
        H: `Q^T A Q`.
        W: test vectors `omega_i` in the basis.
        T: `Q^T A omega_i`.
        forms: `omega_i^T A omega_i`.
    """

    Y: Float[Tensor, "basis vectors"]
    H: Float[Tensor, "basis basis"]
    W: Float[Tensor, "basis vectors"]
    T: Float[Tensor, "basis vectors"]
    forms: Float[Tensor, " vectors"]

    def of(self, is_kept: Bool[Tensor, " vectors"]) -> _Sketch:
        """The products of some of the vectors, in the same basis."""
        return _Sketch(self.Y[:, is_kept], self.H, self.W[:, is_kept], self.T[:, is_kept], self.forms[is_kept])

    def estimates(self, tolerance: float) -> Float[np.ndarray, " vectors"]:
        """Estimate of the trace with each vector left out of the sketch."""
        basis, S = _sketch(self.Y, tolerance)
        H, W, T = basis.T @ self.H @ basis, basis.T @ self.W, basis.T @ self.T
        # Q_i Q_i^T = Q (1 - s_i s_i^T) Q^T, since s_i is the direction in the basis Q that omega_i alone adds. So
        # tr(Q_i^T A Q_i) = tr H - s_i^T H s_i, and Q_i Q_i^T omega_i = Q x_i with x_i = w_i - s_i (s_i^T w_i), so that
        # omega_i^T (1 - Q_i Q_i^T) A (1 - Q_i Q_i^T) omega_i = omega_i^T A omega_i - 2 x_i^T t_i + x_i^T H x_i.
        X = W - S * (S * W).sum(dim=0)
        traces = H.trace() - (S * (H @ S)).sum(dim=0)
        rests = self.forms - 2 * (X * T).sum(dim=0) + (X * (H @ X)).sum(dim=0)
        return np.asarray((traces + rests).cpu())


TRACE_ESTIMATORS: Mapping[str, Callable[..., Estimate]] = {
    "hutchinson": hutchinson_trace,
    "hutchpp": hutchpp_trace,
    "xtrace": xtrace,
}
"""Estimators by name. Hutchinson's is better below about 30 products, XTrace above."""


def estimate_trace(
    operator: SymmetricOperator, method: str, num_products: int, *, seed: int, found: Eigenpairs | None
) -> Estimate:
    """Trace by the method of that name.

    Args:
        operator: the matrix.
        method: one of `TraceMethod`.
        num_products: products to spend; `hutchpp` and `xtrace` need 6.
        seed: seed of the random vectors.
        found: eigenpairs that `deflated` removes; None removes none. The other methods do not use them.

    Raises:
        ConfigError: if the method is unknown, or the products are too few for it.
    """
    require_known("trace_method", method, tuple(TraceMethod))
    if method == TraceMethod.deflated:
        return hutchinson_trace(operator, num_products, seed=seed, found=found)
    return TRACE_ESTIMATORS[method](operator, num_products, seed=seed)


def _columns_times(operator: SymmetricOperator, columns: Tensor) -> Tensor:
    """The matrix times each column, in float64."""
    return operator.apply(columns.T.to(operator.dtype)).double().T


def _sketch(images: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Orthonormal basis `Q` of the columns, and in it the unit direction `s_i` that each column alone adds.

    Singular values below `tolerance` times the largest one are rounding. With the singular value decomposition
    `U S V^T`, column i adds a direction if `e_i` lies in the row space, `sum_j V_ij^2 = 1`. The direction is
    `S^-1 V^T e_i`, orthogonal to all other columns. A linear combination of other columns adds none.
    """
    left, values, right = torch.linalg.svd(images, full_matrices=False)
    rank = int((values > tolerance * values.max()).sum())
    rows = right[:rank]
    adds = rows.square().sum(dim=0) > 1 - tolerance
    return left[:, :rank], torch.nn.functional.normalize(rows / values[:rank, None], dim=0) * adds


def _mean_of_probes(operator: SymmetricOperator, random: RandomVectors, count: int, known: float) -> Estimate:
    sums = ProbeSums()
    for start in range(0, count, VECTORS_AT_ONCE):  # few at a time, so that memory does not grow with their number
        probes = random.signs(min(VECTORS_AT_ONCE, count - start))
        for probe, image in zip(probes, operator.apply(probes), strict=True):
            sums.add(probe, image)
    quadratic = np.array(sums.forms)
    if operator.is_semidefinite and quadratic.mean() > 0:
        return _chi_squared(quadratic, np.array(sums.squares), known)
    error = math.sqrt(sums.variance / count)
    return StudentMean(known + float(quadratic.mean()), error, sums.freedom, count).estimate


class ProbeSums:
    """Forms `z^T R z` of random signs, and their variance from the products `R z` rather than from the forms alone.

    With `d = z * R z`, entry by entry, a form is the sum of `d`, and `cov(d_i, d_k) = R_ik^2 = R_ki^2`. So its variance
    is twice the sum of the variances of the entries of `d`. Few forms show less of it: forms of a matrix of rank 1, of
    which a sketch may leave one, are chi-squared of one degree of freedom, and often near each other and 0 at once.
    Attributes `forms` and `squares` are `z^T R z` and `||R z||^2` of each vector.
    """

    def __init__(self) -> None:
        self.forms: list[float] = []
        self.squares: list[float] = []
        self._mean: Tensor | None = None
        self._spread = 0.0
        self._first_of_two: Tensor | None = None
        self._overlaps: list[float] = []

    def add(self, probe: Float[Tensor, " parameters"], image: Float[Tensor, " parameters"]) -> None:
        """Take in a vector and its product."""
        self.forms.append(inner(probe, image))
        self.squares.append(inner(image, image))
        count, terms = len(self.forms), probe * image
        if self._mean is None:
            self._mean = terms
        else:
            terms -= self._mean
            self._spread += (count - 1) / count * inner(terms, terms)
            self._mean.add_(terms, alpha=1 / count)
        if self._first_of_two is None:
            self._first_of_two = image.clone()
        else:
            self._overlaps.append(inner(self._first_of_two, image))
            self._first_of_two = None

    @property
    def variance(self) -> float:
        """Variance of a form; of one vector the bound `2 ||R z||^2`, whose mean is `2 ||R||_F^2`."""
        count = len(self.forms)
        return 2 * (self._spread / (count - 1) if count > 1 else self.squares[0])

    @property
    def least_variance_of_block(self) -> float:
        """Least variance to assume for forms `z_b^T (R z)_b` of a block, with vectors `z` over all blocks.

        The sum of the variances of the terms `z_i (R z)_i` counts `||R_bb||_F^2 - ||diag R_bb||^2` once and not twice.
        Two terms of one entry `R_ik` are equal in all vectors with probability `2^(1 - vectors)`, and then look like
        the diagonal, which has no variance. Where that is not rare, the bound `2 ||(R z)_b||^2` is assumed.
        The worst coverage simulated was 0.90, for a matrix of rank 1 all of whose parameters are one block.
        """
        count = len(self.forms)
        is_likely_equal = 2.0 ** (1 - count) > 1 - CONFIDENCE
        return max(self._spread / max(count - 1, 1), 2 * float(np.mean(self.squares)) if is_likely_equal else 0.0)

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance, at least one for each vector.

        `||R z||^2` has `tr(R^2)^2 / tr(R^4)` of them (Satterthwaite, 1946). The Gram matrix `G` of two products has the
        mean `tr(R^2)` on its diagonal, and the square of its other entry has the mean `tr(R^4)`. So `tr(G)^2 / tr(G^2)`
        estimates no more than that number, and is 1 for rank 1 whatever the vectors.
        """
        each = np.array(self.squares[: 2 * len(self._overlaps)]).reshape(-1, 2)
        squared = float((each**2).sum() + 2 * np.square(self._overlaps).sum())
        ratio = float((each.sum(axis=1) ** 2).sum()) / squared if squared else 1.0
        return len(self.forms) * max(1.0, ratio)


def _chi_squared(quadratic: np.ndarray, squares: np.ndarray, known: float) -> Estimate:
    """Interval `[n v m / q_high, n v m / q_low]` of a trace of mean `m`, with quantiles of chi-squared of `n v`.

    `z^T A z` is a weighted sum of squares, and close to a scaled chi-squared of `v = 2 tr(A)^2 / variance` degrees of
    freedom (Satterthwaite, 1946, doi:10.2307/3002019). The variance is the larger one of the sample's and of its bound
    `2 ||A||_F^2`; no semidefinite matrix has fewer than one degree of freedom.
    """
    count, mean = len(quadratic), float(quadratic.mean())
    variance = max(2 * float(squares.mean()), float(quadratic.var(ddof=1)) if count > 1 else 0.0)
    freedom = count * max(1.0, 2 * mean**2 / variance)
    tails = ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    low, high = (known + freedom * mean / float(chi2.ppf(tail, freedom)) for tail in tails)
    return Estimate(known + mean, math.sqrt(variance / count), count, low, high, IntervalKind.chi_squared)


def _require_products(got: int, least: int, method: str) -> None:
    if got < least:
        raise ConfigError(f"the {method} estimator needs at least {least} products, got {got}")
