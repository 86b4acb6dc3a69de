"""How the eigenvalues of an operator are spread: stochastic Lanczos quadrature, known eigenpairs taken out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from rm_optimizer.core.estimate import Estimate, cluster_bootstrap
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.combined import DeflatedOperator
from rm_optimizer.landscape.krylov import KrylovState
from rm_optimizer.landscape.lanczos import Eigenpairs, extend
from rm_optimizer.landscape.operators import SymmetricOperator
from rm_optimizer.landscape.random_vectors import RandomVectors
from rm_optimizer.landscape.trace import estimate_of_mean
from rm_optimizer.landscape.vectors import length

Terms = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From eigenvalues to the terms `(terms, eigenvalues)` that are added up over them."""
Combine = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From totals `(terms, …)` to a number `(…)`."""


@dataclass(frozen=True)
class SpectralDensity:
    """The eigenvalues found, and for the rest Gauss quadrature rules from random vectors.

    Args:
        exact: eigenvalues known one by one.
        nodes: where the rest lies, one tuple for each random vector.
        weights: how many eigenvalues each node stands for; of one vector they add up to about the rest's number.
        num_parameters: eigenvalues in all.
        num_products: products spent on the random vectors.
    """

    exact: tuple[float, ...]
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    num_parameters: int
    num_products: int

    def total(self, function: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Estimate:
        """`sum_i f(lambda_i)` over all eigenvalues, with Student's interval over the random vectors.

        Each vector gives an unbiased value where `f` is a polynomial of degree below twice the steps; other functions
        are approximated (Golub & Meurant, 2010).
        """
        known = float(function(np.array(self.exact)).sum()) if self.exact else 0.0
        rules = zip(self.nodes, self.weights, strict=True)
        samples = [float(np.array(weight) @ function(np.array(node))) + known for node, weight in rules]
        return estimate_of_mean(torch.tensor(samples, dtype=torch.float64))

    def statistic(self, terms: Terms, combine: Combine) -> Estimate:
        """A function of several totals, with the jackknife's standard error over the random vectors."""
        known = terms(np.array(self.exact)).sum(axis=1) if self.exact else 0.0
        rules = zip(self.nodes, self.weights, strict=True)
        rows = np.array([[*(terms(np.array(node)) @ np.array(weight)), 1.0] for node, weight in rules])

        def of_totals(totals: np.ndarray) -> np.ndarray:
            return np.asarray(combine(np.moveaxis(totals[..., :-1] / totals[..., -1:] + known, -1, 0)))[..., None]

        return cluster_bootstrap(rows, of_totals, num_bootstrap=0, seed=0)[0]

    def moment(self, power: int) -> Estimate:
        """`sum_i lambda_i^power`: the trace for 1, the square of the Frobenius norm for 2."""
        return self.total(lambda values: values**power)

    def on_grid(self, grid: Float[np.ndarray, " points"], *, width: float) -> Float[np.ndarray, " points"]:
        """Density at points, each eigenvalue spread as a normal of standard deviation `width`; integrates to 1."""
        nodes = np.array([*self.exact, *(value for rule in self.nodes for value in rule)])
        share = max(len(self.nodes), 1)
        weights = np.array([*np.ones(len(self.exact)), *(w / share for rule in self.weights for w in rule)])
        bumps = np.exp(-0.5 * ((np.asarray(grid)[:, None] - nodes) / width) ** 2) / (width * np.sqrt(2 * np.pi))
        density: NDArray[np.float64] = bumps @ (weights / weights.sum())
        return density

    def to_json(self) -> str:
        """The fields as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SpectralDensity:
        """The density that `to_json` wrote."""
        values = json.loads(text)
        rules = {key: tuple(tuple(rule) for rule in values[key]) for key in ("nodes", "weights")}
        return cls(**{**values, "exact": tuple(values["exact"]), **rules})


def spectral_density(
    operator: SymmetricOperator,
    *,
    num_probes: int = 20,
    num_steps: int = 5,
    seed: int,
    found: Eigenpairs | None = None,
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Ubaru, Chen & Saad, 2017; Ghorbani, Krishnan & Xiao, 2019, arXiv:1901.10159).

    From a random vector `z`, `num_steps` of Lanczos give nodes `theta_j` and weights `||z||^2 tau_j^2`, with `tau_j`
    the first entries of the small eigenvectors, such that `z^T f(A) z` is about `sum_j w_j f(theta_j)`. Found
    eigenpairs are taken out of the matrix and of the vectors, and stand in the density exactly.

    Args:
        operator: the matrix.
        num_probes: random vectors.
        num_steps: Lanczos steps of each.
        seed: of the vectors.
        found: eigenpairs to take out; None takes out none.

    Raises:
        ConfigError: if a number is not positive.
    """
    if num_probes < 1 or num_steps < 1:
        raise ConfigError(f"the density needs at least 1 probe and 1 step, got {num_probes} and {num_steps}")
    rest: SymmetricOperator = operator if found is None else DeflatedOperator(operator, found.vectors)
    random = RandomVectors(operator, seed)
    nodes, weights, products = [], [], 0
    for _ in range(num_probes):
        probe = random.signs(1)
        probe = rest.project(probe) if isinstance(rest, DeflatedOperator) else probe
        size = length(probe[0])
        state = KrylovState()
        state.basis.append(probe[0] / size)
        free = operator.dimension - (0 if found is None else len(found.values))
        for _ in range(min(num_steps, free)):
            extend(rest, state, random)
            if state.num_restarts:
                break
        theta, vectors = state.ritz()
        nodes.append(tuple(theta.tolist()))
        weights.append(tuple((size**2 * vectors[0] ** 2).tolist()))
        products += state.num_products
    exact = () if found is None else tuple(found.values.tolist())
    return SpectralDensity(exact, tuple(nodes), tuple(weights), operator.dimension, products)
