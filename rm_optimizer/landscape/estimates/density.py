"""Spectral density of an operator by stochastic Lanczos quadrature, with known eigenpairs deflated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import eigh_tridiagonal, hessenberg

from rm_optimizer.core.metrics.estimate import Estimate, IntervalKind
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, student_mean, with_student_interval
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.operators.base import DeflatedOperator, SymmetricOperator
from rm_optimizer.landscape.operators.vectors import RandomVectors, length
from rm_optimizer.landscape.solvers.krylov import KrylovState, absorb
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs
from rm_optimizer.records.codec import JsonRecord

Terms = Callable[[np.ndarray], np.ndarray]
"""Function of eigenvalues that returns the terms `(terms, eigenvalues)` to sum over them."""
Combine = Callable[[np.ndarray], np.ndarray]
"""Function of totals `(terms, …)` that returns a number `(…)`."""


@dataclass(frozen=True)
class SpectralDensity(JsonRecord):
    """Known eigenvalues, and Gauss quadrature rules from random vectors for the rest.

    Args:
        exact: eigenvalues known one by one.
        nodes: nodes of the quadrature rules, one tuple for each random vector.
        weights: number of eigenvalues that each node represents; over one vector they sum to about the rest's number.
        num_parameters: total number of eigenvalues.
        num_products: products spent on the random vectors.
    """

    exact: tuple[float, ...]
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    num_parameters: int
    num_products: int

    def statistic(self, terms: Terms, combine: Combine) -> Estimate:
        """Function of totals over all eigenvalues, with Student's interval for random vectors and quadrature.

        Totals of polynomials of degree below twice the steps are unbiased; others, such as `|lambda|`, the rules only
        approximate (Golub & Meurant, 2010), all vectors in the same way. The standard error is the root of the sum of
        two squares: the jackknife's error over vectors, and the change by the rules' last step. The second part
        overstates the error of rules that converge.
        """
        known = terms(np.array(self.exact)).sum(axis=1)

        def of_totals(totals: np.ndarray) -> np.ndarray:
            return np.asarray(combine(np.moveaxis(totals[..., :-1] / totals[..., -1:] + known, -1, 0)))[..., None]

        if not self.nodes:
            value = float(combine(known))
            return Estimate(value, 0.0, 0, value, value, IntervalKind.exact)
        estimate = cluster_bootstrap(self._totals(terms), of_totals, num_bootstrap=0, seed=0)[0]
        if estimate.standard_error is None:
            return estimate
        change = estimate.value - float(of_totals(self._one_step_less()._totals(terms).sum(axis=0))[0])
        return with_student_interval(replace(estimate, standard_error=math.hypot(estimate.standard_error, change)))

    def moment(self, power: int) -> Estimate:
        """`sum_i lambda_i^power`: the trace for 1, the square of the Frobenius norm for 2.

        The interval is Student's over the random vectors. With `B = A^power`, a form `z^T B z` of random signs has the
        variance `2 (||B||_F^2 - ||diag B||^2)`, at most `2 (tr(B^2) - tr(B)^2 / n)`. The larger one of this bound and
        of the sample's variance is used, since few forms are often similar. Each vector gives an unbiased value if the
        power is below twice the steps. The standard error of a higher power includes the change by the last step, as in
        `statistic`.
        """
        known = float(sum(value**power for value in self.exact))
        if not self.nodes:
            return Estimate(known, 0.0, 0, known, known, IntervalKind.exact)

        def samples(density: SpectralDensity) -> Float[np.ndarray, "kinds vectors"]:
            return density._totals(lambda values: np.stack([values**power, values ** (2 * power)]))[:, :2].T

        forms, squares = samples(self)
        is_unbiased = power < 2 * max(map(len, self.nodes))
        change = 0.0 if is_unbiased else float((forms - samples(self._one_step_less())[0]).mean())
        bound = 2 * float(squares.mean() - forms.mean() ** 2 / self.num_parameters)
        return student_mean(known + forms, bias=change, least_variance=bound)

    def _totals(self, terms: Terms) -> Float[np.ndarray, "vectors columns"]:
        """Totals of each vector over the unknown eigenvalues, with a 1 appended that counts vectors in sums."""
        rules = zip(self.nodes, self.weights, strict=True)
        return np.array([[*(terms(np.array(node)) @ np.array(weight)), 1.0] for node, weight in rules])

    def _one_step_less(self) -> SpectralDensity:
        """Quadrature of the same vectors with one step less."""
        rules = [_one_step_less(*rule) for rule in zip(self.nodes, self.weights, strict=True)]
        nodes, weights = (tuple(tuple(side.tolist()) for side in sides) for sides in zip(*rules, strict=True))
        return replace(self, nodes=nodes, weights=weights)

    def on_grid(self, grid: Float[np.ndarray, " points"], *, width: float) -> Float[np.ndarray, " points"]:
        """Density at points; integrates to 1.

        Each eigenvalue is spread as a normal of standard deviation `width`. A node that represents many eigenvalues is
        spread by half the distance to its farther neighbor if that is more, since a rule has no information between
        its nodes.
        """
        nodes, widths = self.spread_nodes(width)
        share = max(len(self.nodes), 1)
        weights = np.array([*np.ones(len(self.exact)), *(w / share for rule in self.weights for w in rule)])
        bumps = np.exp(-0.5 * ((np.asarray(grid)[:, None] - nodes) / widths) ** 2) / (widths * np.sqrt(2 * np.pi))
        density: np.ndarray = bumps @ (weights / weights.sum())
        return density

    def spread_nodes(self, width: float) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
        """Eigenvalues and nodes, and the standard deviation of each one's normal."""
        nodes = np.array([*self.exact, *(value for rule in self.nodes for value in rule)])
        widths = [np.full(len(self.exact), width)]
        for rule in self.nodes:
            gaps = np.diff(rule)
            farther = np.maximum(np.concatenate([gaps[:1], gaps]), np.concatenate([gaps, gaps[-1:]]))
            widths.append(np.maximum(farther / 2, width) if len(gaps) else np.full(len(rule), width))
        return nodes, np.concatenate(widths)


def spectral_density(
    operator: SymmetricOperator,
    *,
    num_probes: int = 4,
    num_steps: int = 25,
    seed: int,
    found: Eigenpairs | None = None,
    at_once: int = 1,
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Ubaru, Chen & Saad, 2017; Ghorbani, Krishnan & Xiao, 2019, arXiv:1901.10159).

    From a random vector `z`, `num_steps` of Lanczos give nodes `theta_j` and weights `||z||^2 tau_j^2`, with `tau_j`
    the first entries of the small eigenvectors, such that `z^T f(A) z` is about `sum_j w_j f(theta_j)`. Found
    eigenpairs are removed from the matrix and from the vectors, and enter the density exactly.

    Args:
        operator: the matrix.
        num_probes: random vectors.
        num_steps: Lanczos steps of each; the change by the last one estimates the error.
        seed: seed of the vectors.
        found: eigenpairs to deflate; None deflates none.
        at_once: random vectors whose iterations take their products together, each of which holds its own basis. Where
            the operator builds a graph anew in each call, they share it. The numbers are equal up to rounding.

    Raises:
        ConfigError: if there is no probe, or fewer than two steps.
    """
    if num_probes < 1 or num_steps < 2:
        raise ConfigError(f"the density needs at least 1 probe of 2 steps, got {num_probes} of {num_steps}")
    rest: SymmetricOperator = operator if found is None else DeflatedOperator(operator, found.vectors)
    random = RandomVectors(operator, seed)
    nodes, weights, products = [], [], 0
    free = operator.dimension - (0 if found is None else len(found.values))
    for start in range(0, num_probes if free else 0, at_once):
        probes: list[tuple[float, KrylovState]] = []
        for _ in range(min(at_once, num_probes - start)):
            probe = random.signs(1)
            probe = rest.project(probe) if isinstance(rest, DeflatedOperator) else probe
            size, state = length(probe[0]), KrylovState()
            state.basis.append(probe[0] / size)
            probes.append((size, state))
        running = [state for _, state in probes]
        for _ in range(min(num_steps, free)):  # in lockstep, each until its space is exhausted
            if not running:
                break
            images = rest.apply(torch.stack([state.basis.last() for state in running]))
            for state, image in zip(running, images, strict=True):
                absorb(rest, state, random, image)
            running = [state for state in running if not state.num_restarts]
        for size, state in probes:
            theta, vectors = state.ritz()
            nodes.append(tuple(theta.tolist()))
            weights.append(tuple((size**2 * vectors[0] ** 2).tolist()))
            products += state.num_products
    exact = () if found is None else tuple(found.values.tolist())
    return SpectralDensity(exact, tuple(nodes), tuple(weights), operator.dimension, products)


def _one_step_less(nodes: tuple[float, ...], weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Gauss rule of one node less for the same vector; a single node is exact, since no second step was possible.

    Householder reflections that keep the first axis bring `[[1, sqrt(w)^T], [sqrt(w), diag(theta)]]` to tridiagonal
    form. Without its first row and column it is the matrix whose eigenvalues are the nodes (Gragg & Harwood, 1984).
    """
    arrow = np.diag([1.0, *nodes])
    arrow[0, 1:] = arrow[1:, 0] = np.sqrt(weights)
    tridiagonal = hessenberg(arrow)[1:, 1:]
    size = len(nodes) - 1
    if size == 0:
        return np.array(nodes), np.array(weights)
    theta, vectors = eigh_tridiagonal(np.diag(tridiagonal)[:size], np.diag(tridiagonal, -1)[: size - 1])
    return theta, sum(weights) * vectors[0] ** 2


_POINTS = 400
_WIDTH = 0.01
"""Standard deviation of the normal for one eigenvalue, relative to the range of all eigenvalues."""
SPREAD = "each node spread by half the way to its neighbors, at least 1 % of the range"
"""Width of the figure's kernel, for its caption."""


@dataclass(frozen=True)
class DensityCurve:
    """Share of eigenvalues per unit.

    Args:
        grid: eigenvalues.
        density: share of all eigenvalues per unit at each; integrates to 1.
        standard_error: standard error over random vectors, without the quadrature's own error; NaN for one vector, 0 if
            every eigenvalue is known.
    """

    grid: Float[np.ndarray, " points"]
    density: Float[np.ndarray, " points"]
    standard_error: Float[np.ndarray, " points"]


def density_curve(density: SpectralDensity) -> DensityCurve:
    """Density over the range of all known eigenvalues and nodes, each spread by at least 1 % of the range."""
    known = density.spread_nodes(0.0)[0]
    low, high = float(known.min()), float(known.max())
    width = _WIDTH * (high - low) or _WIDTH * max(abs(high), 1.0)
    spread = density.spread_nodes(width)[1]
    grid = np.linspace(float((known - 5 * spread).min()), float((known + 5 * spread).max()), _POINTS)
    rules = list(zip(density.nodes, density.weights, strict=True))
    curves = [replace(density, nodes=(n,), weights=(w,)).on_grid(grid, width=width) for n, w in rules]
    if len(curves) > 1:
        error = np.std(curves, axis=0, ddof=1) / math.sqrt(len(curves))
    else:
        error = np.full(_POINTS, math.nan if curves else 0.0)
    return DensityCurve(grid, density.on_grid(grid, width=width), error)
